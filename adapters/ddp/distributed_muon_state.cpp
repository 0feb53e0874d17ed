#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <utility>

#include "adapters/ddp/distributed_muon.h"
#include "engine/agreement.h"
#include "engine/error.h"

namespace dmuon {
namespace {

using AdamWState = torch::optim::AdamWParamState;
using Section = c10::Dict<std::string, at::Tensor>;
using Sections = c10::Dict<std::string, Section>;

AdamWState& adamw_state(torch::optim::AdamW& adamw, const at::Tensor& parameter) {
  auto& state = adamw.state()[parameter.unsafeGetTensorImpl()];
  if (!state) {
    auto fresh = std::make_unique<AdamWState>();
    fresh->exp_avg(at::zeros_like(parameter.detach()));
    fresh->exp_avg_sq(at::zeros_like(parameter.detach()));
    state = std::move(fresh);
  }
  return static_cast<AdamWState&>(*state);
}

at::Tensor on_cpu(const at::Tensor& value) {
  return value.detach().to(at::kCPU, false, true).contiguous();
}

// Whole or not at all: what was there stays until the new file is complete.
void write_file(const std::string& path, const std::vector<char>& bytes) {
  const std::string part = path + ".part";
  std::ofstream file(part, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file || std::rename(part.c_str(), path.c_str()) != 0) {
    throw ConfigError(message(
        "'", path, "' cannot be written. Give a file in a folder that rank 0 ", "may write to."));
  }
}

c10::impl::GenericDict read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw ConfigError(message("'", path, "' cannot be read on rank 0. Does it exist?"));
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  try {
    return torch::jit::pickle_load(bytes).toGenericDict();
  } catch (const std::exception&) {
    throw ConfigError(message("'", path, "' is not a file that save() has written."));
  }
}

at::Tensor find(const c10::impl::GenericDict& file, const std::string& section,
                const std::string& name) {
  const auto entries = file.find(section);
  if (entries == file.end()) return {};
  const auto names = entries->value().toGenericDict();
  const auto entry = names.find(name);
  return entry == names.end() ? at::Tensor() : entry->value().toTensor();
}

size_t count(const c10::impl::GenericDict& file) {
  size_t entries = 0;
  for (const auto& section : file) entries += section.value().toGenericDict().size();
  return entries;
}

}  // namespace

// `value` has the right sizes and dtype everywhere, and is right on rank `root`.
struct DistributedMuon::Saved {
  std::string section, name;
  at::Tensor value;
  int root = 0;
  std::function<void(const at::Tensor&)> put;

  void broadcast_from(int rank, Transport& transport, const at::Tensor& tensor) const {
    if (tensor.numel() > 0) transport.broadcast({{tensor.view({-1}), rank}}, "(" + name + ")");
  }

  at::Tensor found_in(const c10::impl::GenericDict& file, const std::string& path) const {
    const at::Tensor found = find(file, section, name);
    if (found.defined() && found.sizes() == value.sizes()) return found;
    throw ConfigError(message("'", path, "' does not fit the model: ", section, " of '", name, "' ",
                              found.defined() ? "has other sizes, " : "is missing",
                              found.defined() ? message(found.sizes()) : "", "; the model has ",
                              value.sizes(), "."));
  }
};

std::vector<DistributedMuon::Saved> DistributedMuon::state() {
  std::vector<Saved> all;
  const auto kept_by_all = [&](const char* section, const std::string& name, at::Tensor value) {
    all.push_back({section, name, value, 0, [value](const at::Tensor& v) { value.copy_(v); }});
  };
  for (const auto& p : parameters_) {
    if (p.dedicated) {
      add_owned(p, all);
      continue;
    }
    AdamWState& s = adamw_state(*adamw_, p.value);
    kept_by_all("weights", p.name, p.value.detach());
    kept_by_all("exp_avg", p.name, s.exp_avg());
    kept_by_all("exp_avg_sq", p.name, s.exp_avg_sq());
    all.push_back({"step", p.name, at::full({}, s.step(), at::kLong), 0,
                   [&s](const at::Tensor& v) { s.step(v.item<int64_t>()); }});
  }
  for (const auto& b : model_->named_buffers()) {
    if (b.value().defined()) kept_by_all("buffers", b.key(), b.value());
  }
  return all;
}

void DistributedMuon::add_owned(const ModelParameter& p, std::vector<Saved>& all) {
  const int m = engine_->plan().find(p.name), owner = engine_->plan().owners[m];
  const auto place = engine_->place(m);
  at::Tensor master = engine_->store(place.unit).master(place.slot);
  const auto& own = optimizer_->state(m);
  const auto dtype = p.value.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (!master.defined()) master = at::empty(p.value.sizes(), at::dtype(dtype));
  at::Tensor momentum = own.empty() ? at::empty(p.value.sizes(), at::dtype(at::kFloat))
                                    : own.at("momentum_buffer").view(p.value.sizes());
  all.push_back({"weights", p.name, master, owner,
                 [this, m](const at::Tensor& v) { engine_->set_value(m, v); }});
  all.push_back({"momentum_buffer", p.name, momentum, owner,
                 [momentum](const at::Tensor& v) { momentum.copy_(v); }});
}

void DistributedMuon::save(const std::string& path) {
  const c10::NoGradGuard no_grad;
  wait();
  Sections file;
  for (const Saved& part : state()) {
    const at::Tensor value = on_cpu(part.value);
    if (part.root != 0) part.broadcast_from(part.root, engine_->control(), value);
    if (engine_->rank() != 0) continue;
    if (!file.contains(part.section)) file.insert(part.section, Section());
    file.at(part.section).insert(part.name, value);
  }
  Proposal mine;
  try {
    if (engine_->rank() == 0) write_file(path, torch::jit::pickle_save(file));
  } catch (const std::exception& error) {
    mine.error = error.what();
  }
  agree(engine_->control(), mine);
}

void DistributedMuon::load(const std::string& path) {
  const c10::NoGradGuard no_grad;
  wait();
  const std::vector<Saved> parts = state();
  std::vector<at::Tensor> values;
  Proposal mine;
  try {
    if (engine_->rank() == 0) {
      const auto file = read_file(path);
      for (const Saved& part : parts) values.push_back(part.found_in(file, path));
      if (count(file) > parts.size()) {
        throw ConfigError(message("'", path, "' has more in it than the model: ", count(file),
                                  " tensors; the model has ", parts.size(), "."));
      }
    }
  } catch (const std::exception& error) {
    mine.error = error.what();
  }
  agree(engine_->control(), mine);
  for (size_t i = 0; i < parts.size(); ++i) {
    const at::Tensor value =
        on_cpu(engine_->rank() == 0 ? values[i].to(parts[i].value.dtype()) : parts[i].value);
    parts[i].broadcast_from(0, engine_->control(), value);
    parts[i].put(value);
  }
  engine_->show_residents();
  wait();
}

}  // namespace dmuon
