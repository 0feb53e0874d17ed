#include "engine/autograd_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace dmuon {

class PreHook final : public torch::autograd::FunctionPreHook {
 public:
  PreHook(std::function<void()> f, torch::autograd::Node* node, std::shared_ptr<HookedNodes> nodes)
      : f_(std::move(f)), node_(node), nodes_(std::move(nodes)) {
    std::lock_guard lock(nodes_->mutex_);
    nodes_->nodes_.push_back(node_);
  }

  ~PreHook() override {  // with its node
    std::lock_guard lock(nodes_->mutex_);
    auto& all = nodes_->nodes_;
    all.erase(std::find(all.begin(), all.end(), node_));
  }

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    f_();
    return gradients;
  }

 private:
  const std::function<void()> f_;
  const void* const node_;
  const std::shared_ptr<HookedNodes> nodes_;
};

bool HookedNodes::any_in_current_pass() const {
  const auto* reached = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (!reached) return false;
  std::lock_guard lock(mutex_);
  return std::any_of(nodes_.begin(), nodes_.end(), [&](const void* node) {
    return reached->count(static_cast<torch::autograd::Node*>(const_cast<void*>(node))) > 0;
  });
}

namespace {

using torch::autograd::variable_list;
// shared_ptr up to torch 2.12, intrusive_ptr since: never spelled out.
using NodePtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

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
  for (const at::Tensor& candidate : {base, output}) {
    if (const auto& node = candidate.grad_fn()) return &*node;
  }
  return nullptr;  // a leaf
}

}  // namespace

int before_backward(const std::vector<at::Tensor>& outputs, const std::function<void()>& f,
                    const std::shared_ptr<HookedNodes>& hooked) {
  std::vector<torch::autograd::Node*> nodes;
  for (const auto& output : outputs) {
    if (auto* node = node_of(output)) nodes.push_back(node);
  }
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
  for (auto* node : nodes) node->add_pre_hook(std::make_unique<PreHook>(f, node, hooked));
  return static_cast<int>(nodes.size());
}

struct AccumulationHook::Impl {
  NodePtr node;
};

AccumulationHook::AccumulationHook(const at::Tensor& parameter, std::function<void()> f)
    : impl_(std::make_unique<Impl>(Impl{torch::autograd::impl::grad_accumulator(parameter)})) {
  impl_->node->add_post_hook(std::make_unique<PostHook>(std::move(f)));
}

bool AccumulationHook::in_current_pass() const {
  const auto* reached = torch::autograd::get_current_graph_task_nodes_in_graph();
  return reached && reached->count(&*impl_->node) > 0;
}

AccumulationHook::~AccumulationHook() = default;
AccumulationHook::AccumulationHook(AccumulationHook&&) noexcept = default;
AccumulationHook& AccumulationHook::operator=(AccumulationHook&&) noexcept = default;

int graph_task_id() { return torch::autograd::get_current_graph_task_id(); }

void at_end_of_backward(std::function<void()> f) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(f));
}

}  // namespace dmuon
