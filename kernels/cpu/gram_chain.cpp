#include "kernels/cpu/gram_chain.h"

#include <utility>

#include "kernels/cpu/product.h"

namespace dmuon::cpu {
namespace {

Panels square(const TileKernels& kernels, float* data, int64_t order, int index) {
  return {data + index * Panels::floats(kernels, order, order), kernels, order, order};
}

}  // namespace

GramChain::GramChain(const TileKernels& kernels, float* data, int64_t order, int threads)
    : kernels_(kernels),
      threads_(threads),
      r_(square(kernels, data, order, 0)),
      z_(square(kernels, data, order, 1)),
      q_(square(kernels, data, order, 2)),
      spare_(square(kernels, data, order, 3)) {}

void GramChain::multiply(const Panels& out, const Panels& a, const Panels& b, double alpha,
                         double beta, const Panels& c) const {
  multiply_symmetric(kernels_,
                     {.a = a,
                      .b = b,
                      .alpha = static_cast<float>(alpha),
                      .beta = static_cast<float>(beta),
                      .c = c,
                      .out = out},
                     /*mirror=*/true, threads_);
}

void GramChain::run(const CoefficientSet& coefficients, int begin, int end) {
  for (int i = begin; i < end; ++i) step(coefficients.row(i), i == begin, i + 1 == end);
}

void GramChain::step(const CoefficientRow& row, bool first, bool last) {
  const auto& [a, b, c] = row;
  multiply(z_, r_, r_, c, b, r_);
  if (!last) advance_gram(a);
  if (first) {
    start_product(a);
  } else {
    extend_product(a);
  }
}

void GramChain::advance_gram(double a) {
  multiply(spare_, r_, z_, 1, a, r_);
  multiply(r_, z_, spare_, 1, a, spare_);
}

void GramChain::start_product(double a) {
  std::swap(q_, z_);
  for (int64_t i = 0; i < q_.depth; ++i) *q_.at(i, i) += static_cast<float>(a);
}

// Whole, it is the transpose of Q that q_ holds, since a product takes its left factor transposed.
void GramChain::extend_product(double a) {
  if (q_.depth < kWholeBelow) {
    transpose(kernels_, q_, spare_);
    multiply_rows(kernels_,
                  {.a = spare_, .b = z_, .beta = static_cast<float>(a), .c = q_, .out = q_}, 0,
                  q_.padded_depth);
  } else {
    multiply(spare_, z_, q_, 1, a, q_);
    std::swap(q_, spare_);
  }
}

}  // namespace dmuon::cpu
