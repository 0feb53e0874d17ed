#include "kernels/cpu/product.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>

#include <vector>

#include "tests/kernels/cpu/every_isa.h"
#include "tests/kernels/matrices.h"

namespace dmuon::cpu {
namespace {

View view_of(const at::Tensor& x) {
  return {x.data_ptr(), x.scalar_type(), x.size(0), x.size(1), x.stride(0), x.stride(1)};
}

// Panels that own their memory, full of NaN until they are written.
struct Owned {
  Owned(const TileKernels& kernels, int64_t depth, int64_t lanes)
      : kernels(kernels),
        memory(Panels::floats(kernels, depth, lanes), NAN),
        panels(memory.data(), kernels, depth, lanes) {}

  Owned(const TileKernels& kernels, const at::Tensor& x) : Owned(kernels, x.size(0), x.size(1)) {
    pack(kernels, view_of(x), 0, 0, 1, panels);
  }

  at::Tensor tensor() const {
    const at::Tensor out = at::empty({panels.depth, panels.lanes}, at::kFloat);
    unpack(kernels, panels, view_of(out), 0, 0);
    return out;
  }

  const TileKernels& kernels;
  std::vector<float> memory;
  Panels panels;
};

// Each of the sums has `depth` terms and rounds as often.
double tolerance(int64_t depth) { return static_cast<double>(depth + 2) * kEpsilon; }

class Products : public EveryIsa {};

TEST_P(Products, OfAMatrixWithItsTransposeAreSymmetric) {
  for (int64_t order : {1, 7, 24, 33, 64, 130}) {
    for (int64_t depth : {1, 5, 256, 300}) {
      const at::Tensor x = float32(random_matrix({depth, order}));
      const Owned a(kernels(), x);
      Owned out(kernels(), order, order);
      multiply_symmetric(kernels(),
                         {.a = a.panels, .b = a.panels, .c = out.panels, .out = out.panels},
                         /*mirror=*/true, 1);
      const at::Tensor got = out.tensor(), wide = x.to(at::kDouble);
      EXPECT_LT(distance(got, wide.t().mm(wide)), tolerance(depth)) << order << ", " << depth;
      EXPECT_TRUE(at::equal(got, got.t())) << order << ", " << depth;
    }
  }
}

TEST_P(Products, OfCommutingMatricesAddWhatTheyAreAskedTo) {
  for (int64_t order : {3, 40, 161, 290}) {
    const at::Tensor x = random_matrix({order, order});
    const at::Tensor r = float32(x.mm(x.t()) / order),
                     s = float32(x.mm(x.t()).mm(x.mm(x.t())) / order);
    const Owned a(kernels(), r), b(kernels(), s);
    Owned out(kernels(), order, order);
    multiply_symmetric(
        kernels(),
        {.a = a.panels, .b = b.panels, .alpha = 0.5f, .beta = -2, .c = a.panels, .out = out.panels},
        /*mirror=*/true, 1);
    const at::Tensor want = r.to(at::kDouble).mm(s.to(at::kDouble)) * 0.5 - 2 * r.to(at::kDouble);
    EXPECT_LT(distance(out.tensor(), want), tolerance(order)) << order;
    EXPECT_TRUE(at::equal(out.tensor(), out.tensor().t())) << order;
  }
}

TEST_P(Products, AccumulateOverBlocksOfDepth) {
  const at::Tensor x = float32(random_matrix({500, 70}));
  Owned out(kernels(), 70, 70);
  for (int64_t k : {0, 200}) {
    const Owned block(kernels(), x.slice(0, k, k == 0 ? 200 : 500));
    multiply_symmetric(kernels(),
                       {.a = block.panels,
                        .b = block.panels,
                        .beta = k == 0 ? 0.0f : 1.0f,
                        .c = out.panels,
                        .out = out.panels},
                       /*mirror=*/k != 0, 1);
  }
  EXPECT_LT(distance(out.tensor(), x.to(at::kDouble).t().mm(x.to(at::kDouble))), tolerance(500));
}

TEST_P(Products, OfAnyTwoMatrices) {
  for (auto [rows, depth, cols] :
       {std::array{1, 1, 1}, {9, 31, 47}, {100, 270, 33}, {33, 64, 96}}) {
    const at::Tensor a = float32(random_matrix({depth, rows}, 5));
    const at::Tensor b = float32(random_matrix({depth, cols}, 6));
    const at::Tensor c = float32(random_matrix({rows, cols}, 7));
    const Owned left(kernels(), a), right(kernels(), b), add(kernels(), c);
    Owned out(kernels(), rows, cols);
    multiply_rows(
        kernels(),
        {.a = left.panels, .b = right.panels, .beta = 3, .c = add.panels, .out = out.panels}, 0,
        out.panels.padded_depth);
    const at::Tensor want = a.to(at::kDouble).t().mm(b.to(at::kDouble)) + 3 * c.to(at::kDouble);
    EXPECT_LT(distance(out.tensor(), want), tolerance(depth)) << rows;
  }
}

TEST_P(Products, HaveTheSameBitsForAnyNumberOfThreads) {
  const Owned a(kernels(), float32(random_matrix({270, 300})));
  const auto product = [&](int threads) {
    Owned out(kernels(), 300, 300);
    multiply_symmetric(kernels(),
                       {.a = a.panels, .b = a.panels, .c = out.panels, .out = out.panels},
                       /*mirror=*/true, threads);
    return out.tensor();
  };
  for (int threads : {2, 3, 4}) EXPECT_TRUE(at::equal(product(threads), product(1))) << threads;
}

TEST_P(Products, LeaveThePaddingZero) {
  const Owned a(kernels(), float32(random_matrix({11, 9})));
  Owned out(kernels(), 9, 9);
  multiply_symmetric(kernels(), {.a = a.panels, .b = a.panels, .c = out.panels, .out = out.panels},
                     /*mirror=*/true, 1);
  for (int64_t row = 0; row < out.panels.padded_depth; ++row) {
    for (int64_t lane = row < 9 ? 9 : 0; lane < out.panels.width && lane < 9; ++lane) {
      EXPECT_EQ(*out.panels.at(row, lane), 0) << row << ", " << lane;
    }
  }
}

// Each factor is exact in bfloat16, so that only the sums round.
TEST_P(Products, OfPairsOfBfloat16AreThoseOfTheirRoundedValues) {
  if (kernels().multiply_pairs[0] == nullptr) return;
  for (int64_t depth : {1, 6, 255, 601}) {
    const at::Tensor a = random_matrix({depth, 70}, 3).to(at::kBFloat16);
    const Owned wide(kernels(), a);
    Owned pairs(kernels(), (depth + 1) / 2, 70), out(kernels(), 70, 70);
    to_pairs(kernels(), wide.panels, pairs.panels);
    const Product product{
        .a = pairs.panels, .b = pairs.panels, .c = out.panels, .out = out.panels, .pairs = true};
    const at::Tensor exact_a = a.to(at::kDouble), want = exact_a.t().mm(exact_a);
    multiply_rows(kernels(), product, 0, out.panels.padded_depth);
    EXPECT_LT(distance(out.tensor(), want), tolerance(depth)) << depth;
    multiply_symmetric(kernels(), product, /*mirror=*/true, 1);
    EXPECT_LT(distance(out.tensor(), want), tolerance(depth)) << depth;
  }
}

class Packing : public EveryIsa {};

TEST_P(Packing, OfEveryDtypeAndLayoutRoundsNothing) {
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (auto [rows, cols] : {std::pair{5, 9}, {40, 300}, {33, 70}}) {
      const at::Tensor x = random_matrix({rows, cols}).to(dtype);
      const at::Tensor want = float32(x);
      EXPECT_TRUE(at::equal(Owned(kernels(), x).tensor(), want)) << dtype << rows;
      EXPECT_TRUE(at::equal(Owned(kernels(), x.t()).tensor(), want.t())) << dtype << rows;
    }
  }
}

TEST_P(Packing, KeepsTheSpecialValuesOfEveryDtype) {
  for (at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const double tiny = dtype == at::kHalf ? 0x1p-24 : 0x1p-133;
    for (double value :
         {0.0, -0.0, tiny, -3 * tiny, 65504.0, double{INFINITY}, -double{INFINITY}}) {
      const at::Tensor x = at::full({2, 3}, value, dtype);
      EXPECT_TRUE(at::equal(Owned(kernels(), x).tensor(), float32(x))) << dtype << ", " << value;
    }
    const at::Tensor nan = at::full({2, 3}, double{NAN}, dtype);
    EXPECT_TRUE(Owned(kernels(), nan).tensor().isnan().all().item<bool>());
  }
}

TEST_P(Packing, TakesAPartAndScalesIt) {
  const at::Tensor x = float32(random_matrix({60, 90}));
  for (const at::Tensor& source : {x, float32(x.t().contiguous().t())}) {
    Owned part(kernels(), 13, 40);
    pack(kernels(), view_of(source), 8, 21, 0.5f, part.panels);
    EXPECT_TRUE(at::equal(part.tensor(), x.narrow(0, 8, 13).narrow(1, 21, 40) * 0.5));
  }
}

TEST_P(Packing, TransposesPanels) {
  for (auto [rows, cols] : {std::pair{1, 1}, {5, 130}, {130, 5}, {64, 96}}) {
    const Owned in(kernels(), float32(random_matrix({rows, cols})));
    Owned out(kernels(), cols, rows);
    transpose(kernels(), in.panels, out.panels);
    EXPECT_TRUE(at::equal(out.tensor(), in.tensor().t())) << rows;
  }
}

TEST_P(Packing, WritesWhatTorchRoundsTo) {
  // Down to the subnormals of float16 and up to where it overflows.
  const at::Tensor x = float32(random_matrix({17, 50}) * 3);
  for (int64_t i = 0; i < 17; ++i) x[i].mul_(std::ldexp(1.0, static_cast<int>(2 * i - 26)));
  x[16].mul_(0x1p10);
  const Owned in(kernels(), x);
  for (at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor out = at::empty({17, 50}, dtype);
    unpack(kernels(), in.panels, view_of(out), 0, 0);
    EXPECT_TRUE(at::equal(out, x.to(dtype)));
  }
}

TEST_P(Packing, AddsSquaresInFloat64) {
  const at::Tensor x = float32(random_matrix({1000}) * 1e30);
  const double want = x.to(at::kDouble).square().sum().item<double>();
  EXPECT_NEAR(kernels().sum_of_squares(x.const_data_ptr<float>(), 1000) / want, 1, 1e-13);
}

INSTANTIATE_TEST_SUITE_P(Levels, Products, ::testing::ValuesIn(available_isas()), name_of);
INSTANTIATE_TEST_SUITE_P(Levels, Packing, ::testing::ValuesIn(available_isas()), name_of);

}  // namespace
}  // namespace dmuon::cpu
