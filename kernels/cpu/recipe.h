// How one matrix is computed: decided from shape, options and processor, before anything runs.
#pragma once
#include <string>
#include <vector>

#include "kernels/cpu/isa.h"
#include "kernels/newton_schulz.h"

namespace dmuon::cpu {

struct Recipe {
  Isa isa = Isa::portable;
  NsAlgorithm form = NsAlgorithm::direct;
  bool bfloat16 = false;    // X and the products with it; else all is float32
  std::vector<int> bounds;  // of gram: chain i takes steps [bounds[i], bounds[i + 1])
  int steps = 0;
  CoefficientSet coefficients;
};

Recipe recipe_for(int64_t rows, int64_t cols, const NewtonSchulz& options);

// What the products of the recipe take, one multiply-add being two, a symmetric product half.
double true_flops(const Recipe& recipe, int64_t rows, int64_t cols);

// e.g. "gram/avx512/float32"
std::string recipe_name(const Recipe& recipe);

}  // namespace dmuon::cpu
