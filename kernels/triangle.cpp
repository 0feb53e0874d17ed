#include "kernels/triangle.h"

namespace dmuon {
namespace {

at::Tensor block(const at::Tensor& x, int64_t row, int64_t col, int64_t rows, int64_t cols) {
  return x.narrow(-2, row, rows).narrow(-1, col, cols);
}

// The square's quadrants: upper left h x h, lower right f x f, with h - f = 0 or 1. Their triangles
// share `fold`, one above and one below its staircase; `beside` is the quadrant between them.
struct Halves {
  explicit Halves(int64_t n) : h((n + 1) / 2), f(n - h), even(h == f ? 1 : 0) {}

  at::Tensor fold(const at::Tensor& packed) const {
    return packed.narrow(-1, 0, h * (h + even)).unflatten(-1, {h, h + even});
  }
  at::Tensor beside(const at::Tensor& packed) const {
    return packed.narrow(-1, h * (h + even), h * f).unflatten(-1, {h, f});
  }
  at::Tensor first(const at::Tensor& fold) const { return block(fold, 0, even, h, h); }
  at::Tensor second(const at::Tensor& fold) const { return block(fold, 1 - even, 0, f, f); }

  int64_t h, f, even;
};

}  // namespace

void pack_triangle(at::Tensor packed, const at::Tensor& square) {
  const Halves halves(square.size(-1));
  const auto [h, f, even] = halves;
  const at::Tensor fold = halves.fold(packed);
  fold.zero_();
  halves.first(fold).copy_(block(square, 0, 0, h, h).triu());
  halves.second(fold).add_(block(square, h, h, f, f).mT().tril());
  halves.beside(packed).copy_(block(square, 0, h, h, f));
}

void unpack_triangle(at::Tensor square, const at::Tensor& packed) {
  const Halves halves(square.size(-1));
  const auto [h, f, even] = halves;
  const at::Tensor fold = halves.fold(packed), beside = halves.beside(packed);
  const at::Tensor upper = halves.first(fold).triu(), lower = halves.second(fold).tril();
  block(square, 0, 0, h, h).copy_(upper).add_(upper.triu(1).mT());
  block(square, h, h, f, f).copy_(lower).add_(lower.tril(-1).mT());
  block(square, 0, h, h, f).copy_(beside);
  block(square, h, 0, f, h).copy_(beside.mT());
}

}  // namespace dmuon
