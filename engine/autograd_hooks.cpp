#include "engine/autograd_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace dmuon {
namespace {

using torch::autograd::variable_list;
// shared_ptr up to torch 2.12, intrusive_ptr since: never spelled out.
using NodePtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

struct PreHook final : torch::autograd::FunctionPreHook {
  explicit PreHook(std::function<void()> f) : f(std::move(f)) {}
  variable_list operator()(const variable_list& grads) override {
    f();
    return grads;
  }
  std::function<void()> f;
};

struct PostHook final : torch::autograd::FunctionPostHook {
  explicit PostHook(std::function<void()> f) : f(std::move(f)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    f();
    return outputs;
  }
  std::function<void()> f;
};

torch::autograd::Node* node_of(const at::Tensor& output) {
  if (!output.defined() || !output.requires_grad()) return nullptr;
  const at::Tensor base = output.is_view() ? at::Tensor(output._base()) : output;
  return base.grad_fn() ? &*base.grad_fn() : &*output.grad_fn();
}

}  // namespace

int before_backward(const std::vector<at::Tensor>& outputs, const std::function<void()>& f) {
  std::vector<torch::autograd::Node*> nodes;
  for (const auto& output : outputs) {
    if (auto* node = node_of(output)) nodes.push_back(node);
  }
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
  for (auto* node : nodes) node->add_pre_hook(std::make_unique<PreHook>(f));
  return static_cast<int>(nodes.size());
}

struct AccumulationHook::Impl {
  NodePtr node;
};

AccumulationHook::AccumulationHook(const at::Tensor& parameter, std::function<void()> f)
    : impl_(std::make_unique<Impl>(Impl{torch::autograd::impl::grad_accumulator(parameter)})) {
  impl_->node->add_post_hook(std::make_unique<PostHook>(std::move(f)));
}

AccumulationHook::~AccumulationHook() = default;
AccumulationHook::AccumulationHook(AccumulationHook&&) noexcept = default;
AccumulationHook& AccumulationHook::operator=(AccumulationHook&&) noexcept = default;

int graph_task_id() { return torch::autograd::get_current_graph_task_id(); }

void at_end_of_backward(std::function<void()> f) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(f));
}

}  // namespace dmuon
