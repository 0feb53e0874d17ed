#include "kernels/triangle.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>

#include <limits>

#include "tests/kernels/matrices.h"

namespace dmuon {
namespace {

at::Tensor there_and_back(const at::Tensor& square) {
  std::vector<int64_t> sizes = square.sizes().vec();
  sizes.pop_back();
  sizes.back() = triangle_elements(square.size(-1));
  at::Tensor packed = at::empty(sizes, square.options());
  at::Tensor back = at::empty(square.sizes(), square.options());
  pack_triangle(packed, square);
  unpack_triangle(back, packed);
  return back;
}

TEST(Triangle, IsTheUpperOneAndComesBackSymmetric) {
  for (int64_t n = 0; n < 9; ++n) {
    for (const at::Tensor& x : {random_matrix({n, n}), random_matrix({3, n, n})}) {
      EXPECT_TRUE(at::equal(there_and_back(x), x.triu() + x.triu(1).mT())) << x.sizes();
    }
  }
}

TEST(Triangle, KeepsANanInItsPlace) {
  at::Tensor x = random_matrix({2, 5, 5});
  x[0][1][3] = std::numeric_limits<double>::quiet_NaN();
  const at::Tensor back = there_and_back(x);
  EXPECT_EQ(back.isnan().sum().item<int64_t>(), 2);
  EXPECT_TRUE(back[0][1][3].isnan().item<bool>());
  EXPECT_TRUE(back[0][3][1].isnan().item<bool>());
}

}  // namespace
}  // namespace dmuon
