// What the parameters of a LibTorch module are to the engine: which are dedicated, and which move
// together.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "engine/plan.h"

namespace torch::nn {
class Module;
}

namespace dmuon {

// Whether a parameter is a weight matrix for Muon. The same answer on every rank.
using Select = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

struct ModelParameter {
  std::string name;                // the smallest of them
  std::vector<std::string> names;  // more than one where it is tied
  at::Tensor value;
  bool dedicated = false;
};

// In the order of registration. Throws ConfigError: no parameter, or none that is chosen; a chosen
// one that is not a matrix of floating-point numbers; one on the meta device; two devices.
std::vector<ModelParameter> select_parameters(const torch::nn::Module& model, const Select& select);

// Of the dedicated ones. `blocks` are paths of modules: the innermost one around a parameter is its
// unit, otherwise the child of the outermost module around it that numbers its children
// (Sequential, ModuleList), otherwise "root". Throws ConfigError: a block that the model does not
// have; a unit of two dtypes.
std::vector<Matrix> as_matrices(const torch::nn::Module& model,
                                const std::vector<ModelParameter>& parameters,
                                const std::vector<std::string>& blocks);

// The innermost of `blocks` that holds the parameter, or -1.
int block_of(const std::string& parameter, const std::vector<std::string>& blocks);

}  // namespace dmuon
