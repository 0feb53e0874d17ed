#include "kernels/iterate.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>

#include <set>
#include <utility>

#include "kernels/flops.h"

namespace dmuon {
namespace {

void multiply(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  if (out.dim() == 2) {
    at::mm_out(out, a, b);
  } else {
    at::bmm_out(out, a, b);
  }
}

}  // namespace

void multiply_add(at::Tensor& out, double beta, const at::Tensor& c, double alpha,
                  const at::Tensor& a, const at::Tensor& b) {
  if (out.dim() == 2) {
    at::addmm_out(out, c, a, b, beta, alpha);
  } else {
    at::baddbmm_out(out, c, a, b, beta, alpha);
  }
}

Iterate::Iterate(at::Tensor x, GramSide side)
    : x_(std::move(x)), spare_(at::empty_like(x_)), side_(side) {}

at::Tensor Iterate::square(at::ScalarType dtype) const {
  std::vector<int64_t> sizes = x_.sizes().vec();
  sizes.end()[-1] = sizes.end()[-2] = order();
  return at::empty(sizes, x_.options().dtype(dtype));
}

void Iterate::gram(at::Tensor& out) const {
  const at::Tensor x = x_.to(out.scalar_type());
  if (side_ == GramSide::rows) {
    multiply(out, x, x.mT());
  } else {
    multiply(out, x.mT(), x);
  }
}

void Iterate::apply(const at::Tensor& q) {
  const at::Tensor factor = q.to(x_.scalar_type());
  if (side_ == GramSide::rows) {
    multiply(spare_, factor, x_);
  } else {
    multiply(spare_, x_, factor.mT());
  }
  std::swap(x_, spare_);
}

void Iterate::apply(double a, const at::Tensor& z) {
  if (side_ == GramSide::rows) {
    multiply_add(spare_, a, x_, 1, z, x_);
  } else {
    multiply_add(spare_, a, x_, 1, x_, z.mT());
  }
  std::swap(x_, spare_);
}

Chain::Chain(at::Tensor gram)
    : r_(std::move(gram)),
      z_(at::empty_like(r_)),
      q_(at::empty_like(r_)),
      spare_(at::empty_like(r_)) {}

void Chain::run(const CoefficientSet& coefficients, int begin, int end) {
  for (int i = begin; i < end; ++i) step(coefficients.row(i), i == begin, i + 1 == end);
}

void Chain::step(const CoefficientRow& row, bool first, bool last) {
  const auto& [a, b, c] = row;
  multiply_add(z_, b, r_, c, r_, r_);
  if (!last) advance_gram(a);
  if (first) {
    start_product(a);
  } else {
    extend_product(a);
  }
}

// R = (a I + Z) R (a I + Z), never with a added to the diagonal of Z.
void Chain::advance_gram(double a) {
  multiply_add(spare_, a, r_, 1, r_, z_);
  multiply_add(r_, a, spare_, 1, z_, spare_);
}

// Q = a I + Z
void Chain::start_product(double a) {
  std::swap(q_, z_);
  q_.diagonal(0, -2, -1).add_(a);
}

// Q = (a I + Z) Q, in this order: then R stays the Gram matrix of Q X under rounding, where Q (a I
// + Z), equal in exact arithmetic, lets the two drift apart.
void Chain::extend_product(double a) {
  multiply_add(spare_, a, q_, 1, z_, q_);
  std::swap(q_, spare_);
}

std::vector<int> chain_bounds(const NewtonSchulz& options, const std::vector<int>& open) {
  const std::vector<int>& asked = options.restarts ? *options.restarts : open;
  const std::set<int> restarts(asked.begin(), asked.end());
  std::vector<int> bounds = {0};
  for (int step = 1; step < options.steps; ++step) {
    if (restarts.contains(step) || step - bounds.back() == kLongestChain) bounds.push_back(step);
  }
  bounds.push_back(options.steps);
  return bounds;
}

}  // namespace dmuon
