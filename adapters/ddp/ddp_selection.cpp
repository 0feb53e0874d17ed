#include "adapters/ddp/ddp_selection.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "engine/error.h"

namespace dmuon {
namespace {

void check(const ModelParameter& parameter, const at::Device& device) {
  const at::Tensor& value = parameter.value;
  if (value.is_meta()) {
    throw ConfigError(message("'", parameter.name,
                              "' is on the meta device. Give the model memory and initialise it."));
  }
  if (value.device() != device) {
    throw ConfigError(message("'", parameter.name, "' is on ", value.device().str(),
                              " and others on ", device.str(),
                              ". Move the whole model to one device."));
  }
  if (parameter.dedicated &&
      (value.dim() < 2 || value.numel() == 0 || !value.is_floating_point())) {
    throw ConfigError(message("'", parameter.name, "' is chosen for Muon and is a ",
                              value.toString(), " of sizes ", value.sizes(),
                              ". Choose matrices of floating-point numbers."));
  }
}

// Sequential, ModuleList, and whatever else numbers its children.
std::vector<std::string> containers(const torch::nn::Module& model) {
  std::vector<std::string> paths;
  for (const auto& module : model.named_modules()) {
    const auto children = module.value()->named_children();
    const auto is_number = [](const auto& child) {
      return child.key().find_first_not_of("0123456789") == std::string::npos;
    };
    if (!children.is_empty() && std::all_of(children.begin(), children.end(), is_number)) {
      paths.push_back(module.key());
    }
  }
  return paths;
}

Matrix as_matrix(const ModelParameter& parameter) {
  const at::Tensor& value = parameter.value;
  const bool batch = value.dim() == 3;  // a convolution is one matrix, an expert one of a batch
  const int64_t rows = value.size(batch ? 1 : 0), count = batch ? value.size(0) : 1;
  const bool is_copy = value.scalar_type() != at::kFloat && value.scalar_type() != at::kDouble;
  return {.name = parameter.name,
          .batch = count,
          .rows = rows,
          .cols = value.numel() / (rows * count),
          .state_bytes = value.numel() * 4,
          .shard_bytes = value.numel() * 4 + (is_copy ? static_cast<int64_t>(value.nbytes()) : 0),
          .dtype = std::string(value.dtype().name())};
}

void check_blocks(const torch::nn::Module& model, const std::vector<std::string>& blocks) {
  std::set<std::string> known;
  for (const auto& module : model.named_modules()) known.insert(module.key());
  for (const auto& block : blocks) {
    if (block.empty() || !known.count(block)) {
      throw ConfigError(
          message("blocks names '", block,
                  "', which is no module of the model. Give paths such as 'layers.0'."));
    }
  }
}

}  // namespace

int block_of(const std::string& parameter, const std::vector<std::string>& blocks) {
  int found = -1;
  for (int b = 0; b < static_cast<int>(blocks.size()); ++b) {
    const bool inside = parameter.starts_with(blocks[b] + ".");
    if (inside && (found < 0 || blocks[b].size() > blocks[found].size())) found = b;
  }
  return found;
}

std::vector<ModelParameter> select_parameters(const torch::nn::Module& model,
                                              const Select& select) {
  std::vector<ModelParameter> all;
  std::map<const void*, size_t> seen;
  for (const auto& item : model.named_parameters()) {
    const auto [at, is_new] = seen.try_emplace(item.value().unsafeGetTensorImpl(), all.size());
    if (is_new) all.push_back({.name = item.key(), .value = item.value()});
    ModelParameter& parameter = all[at->second];
    parameter.names.push_back(item.key());
    parameter.name = std::min(parameter.name, item.key());
    parameter.dedicated |= select(item.key(), item.value());
  }
  if (all.empty()) throw ConfigError("the model has no parameters. Register them first.");
  for (const auto& parameter : all) check(parameter, all.front().value.device());
  if (std::none_of(all.begin(), all.end(), [](const auto& p) { return p.dedicated; })) {
    throw ConfigError(message("none of the ", all.size(), " parameters ('", all.front().name,
                              "', ...) is chosen for Muon. Choose the weight matrices."));
  }
  return all;
}

std::vector<Matrix> as_matrices(const torch::nn::Module& model,
                                const std::vector<ModelParameter>& parameters,
                                const std::vector<std::string>& blocks) {
  check_blocks(model, blocks);
  const auto repeated = containers(model);
  std::vector<Matrix> matrices;
  std::map<std::string, std::string> dtypes;
  for (const auto& parameter : parameters) {
    if (!parameter.dedicated) continue;
    Matrix matrix = as_matrix(parameter);
    matrix.layer = layer_of(matrix.name, repeated);
    const int block = block_of(matrix.name, blocks);
    matrix.unit = block >= 0 ? blocks[block] : matrix.layer.empty() ? "root" : matrix.layer;
    const auto& dtype = dtypes.try_emplace(matrix.unit, matrix.dtype).first->second;
    if (dtype != matrix.dtype) {
      throw ConfigError(message("'", matrix.name, "' is ", matrix.dtype, " and other matrices of '",
                                matrix.unit, "' are ", dtype, ". Use one dtype per block."));
    }
    matrices.push_back(std::move(matrix));
  }
  return matrices;
}

}  // namespace dmuon
