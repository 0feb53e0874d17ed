#include "kernels/sharded_gram.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include <string>

#include "kernels/checks.h"
#include "kernels/error.h"
#include "kernels/exponent.h"

namespace dmuon {
namespace {

// A batch of one is a matrix, as in newton_schulz.
std::vector<int64_t> batched(int64_t batch, std::vector<int64_t> sizes) {
  if (batch != 1) sizes.insert(sizes.begin(), batch);
  return sizes;
}

// A payload or a factor: per matrix its triangle, then its exponent.
class Message {
 public:
  Message(const at::Tensor& flat, int64_t batch, int64_t order, const std::string& what) {
    const int64_t wanted = sharded_gram_elements(batch, order);
    if (flat.dim() != 1 || flat.numel() != wanted || flat.scalar_type() != at::kFloat) {
      throw ConfigError(message("sharded Newton-Schulz got ", what, " of sizes ", flat.sizes(),
                                " and dtype ", flat.scalar_type(), " for ", batch,
                                " matrices of order ", order, "; it takes ", wanted,
                                " float32 elements, as sharded_gram_elements says."));
    }
    rows_ = flat.view(batched(batch, {triangle_elements(order) + 1}));
  }

  at::Tensor triangle() const { return rows_.narrow(-1, 0, rows_.size(-1) - 1); }
  at::Tensor exponent() const { return rows_.narrow(-1, rows_.size(-1) - 1, 1); }

 private:
  at::Tensor rows_;
};

std::vector<Message> messages(const std::vector<at::Tensor>& payloads, int64_t batch,
                              int64_t order) {
  if (payloads.empty()) {
    throw ConfigError("sharded Newton-Schulz got no payloads; give one per rank.");
  }
  std::vector<Message> out;
  for (size_t i = 0; i < payloads.size(); ++i) {
    out.emplace_back(payloads[i], batch, order, message("payloads[", i, "]"));
  }
  return out;
}

std::vector<int> bounds_of(const NewtonSchulz& options) { return chain_bounds(options, {2}); }

int64_t batch_of(at::IntArrayRef sizes) { return sizes.size() == 3 ? sizes[0] : 1; }

at::ScalarType dtype_of_x(const NewtonSchulz& options) {
  return options.dtype == NsDtype::bfloat16 ? at::kBFloat16 : at::kFloat;
}

at::Tensor without_batch_of_one(const at::Tensor& x) {
  return x.dim() == 3 && x.size(0) == 1 ? x.squeeze(0) : x;
}

Scaled scaled_shard(const at::Tensor& shard, const NewtonSchulz& options) {
  options.validate();
  require_matrices(shard);
  const at::NoGradGuard no_grad;
  const at::Tensor x = without_batch_of_one(shard);
  if (x.numel() != 0) return scaled_to_one(x, dtype_of_x(options));
  const at::TensorOptions in = x.options();
  return {at::empty(x.sizes(), in.dtype(dtype_of_x(options))),
          at::full(batched(batch_of(x.sizes()), {1, 1}), kNoExponent, in.dtype(at::kFloat))};
}

at::Tensor largest_exponent(const std::vector<Message>& payloads) {
  at::Tensor largest = payloads[0].exponent();
  for (const Message& payload : payloads) largest = at::maximum(largest, payload.exponent());
  return largest;
}

// In units of 2^(2 exponent), no smaller than any payload's own: no term overflows.
at::Tensor summed(const std::vector<Message>& payloads, const at::Tensor& exponent) {
  at::Tensor sum = at::zeros(payloads[0].triangle().sizes(), exponent.options());
  for (const Message& payload : payloads) {
    const at::Tensor unit = power_of_two(2 * (payload.exponent() - exponent), at::kFloat);
    sum.addcmul_(payload.triangle(), unit);
  }
  return sum;
}

// Divides by the trace, the square of the Frobenius norm, and returns the inverse of that norm; one
// for a matrix of zeros. A NaN or an infinity in X makes a row and a column NaN here, thus one
// element of every row of Q, and all of Q X.
at::Tensor normalise(at::Tensor& gram) {
  at::Tensor trace = gram.diagonal(0, -2, -1).sum(-1).unsqueeze_(-1).unsqueeze_(-1);
  trace.masked_fill_(trace.eq(0), 1);
  gram.div_(trace);
  return trace.rsqrt_();
}

}  // namespace

int sharded_gram_rounds(const NewtonSchulz& options) {
  return static_cast<int>(bounds_of(options).size()) - 1;
}

GramShard::GramShard(const at::Tensor& shard, CutDim cut, const NewtonSchulz& options)
    : GramShard(shard.sizes(), scaled_shard(shard, options), cut) {}

GramShard::GramShard(at::IntArrayRef sizes, const Scaled& scaled, CutDim cut)
    : sizes_(sizes.vec()),
      exponent_(scaled.exponent),
      iterate_(scaled.x, cut == CutDim::rows ? GramSide::cols : GramSide::rows) {
  if (scaled.x.numel() != 0) square_ = iterate_.square(at::kFloat);
}

void GramShard::gram(at::Tensor payload) {
  const at::NoGradGuard no_grad;
  const Message out(payload, batch_of(sizes_), order(), "a payload");
  out.exponent().copy_(exponent_.squeeze(-1));
  if (!square_.defined()) {
    out.triangle().zero_();
  } else {
    iterate_.gram(square_);
    pack_triangle(out.triangle(), square_);
  }
}

void GramShard::apply(const at::Tensor& factor) {
  const at::NoGradGuard no_grad;
  const Message in(factor, batch_of(sizes_), order(), "a factor");
  if (square_.defined()) {
    unpack_triangle(square_, in.triangle());
    const at::Tensor exponent = exponent_ - in.exponent().unsqueeze(-1);
    iterate_.apply(square_.mul_(power_of_two(exponent, at::kFloat)));
  }
  exponent_.zero_();
}

at::Tensor GramShard::result() const {
  const at::NoGradGuard no_grad;
  return iterate_.x().to(at::kFloat).view(sizes_);
}

GramOwner::GramOwner(int64_t batch, int64_t order, const NewtonSchulz& options, at::Device device)
    : batch_(batch),
      order_(order),
      coefficients_(options.coefficients),
      bounds_(bounds_of(options)),
      chain_(at::empty(batched(batch, {order, order}), at::dtype(at::kFloat).device(device))) {
  options.validate();
}

void GramOwner::round(const std::vector<at::Tensor>& payloads, at::Tensor factor) {
  const at::NoGradGuard no_grad;
  require_another_round();
  const std::vector<Message> in = messages(payloads, batch_, order_);
  const Message out(factor, batch_, order_, "a factor");
  const at::Tensor exponent = largest_exponent(in);
  unpack_triangle(chain_.gram(), summed(in, exponent));
  const bool first = round_ == 0;
  const at::Tensor inverse_norm = first ? normalise(chain_.gram()) : at::Tensor();
  chain_.run(coefficients_, bounds_[round_], bounds_[round_ + 1]);
  at::Tensor& symmetric = chain_.gram();
  at::add_out(symmetric, chain_.product(), chain_.product().mT()).mul_(0.5);
  pack_triangle(out.triangle(), first ? symmetric.mul_(inverse_norm) : symmetric);
  out.exponent().copy_(exponent);
  ++round_;
}

void GramOwner::require_another_round() const {
  if (round_ + 1 < bounds_.size()) return;
  throw ConfigError(message("sharded Newton-Schulz got round ", round_ + 1, " of ", round_,
                            "; make a GramOwner per matrix and step, and call round as often as "
                            "sharded_gram_rounds says."));
}

}  // namespace dmuon
