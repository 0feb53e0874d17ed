#include "kernels/pack.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>

#include <vector>

namespace dmuon {
namespace {

std::vector<float> values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kFloat).contiguous();
  return {flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel()};
}

class Pack : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  at::Tensor packed_ = at::full({8}, 9, GetParam());
};

INSTANTIATE_TEST_SUITE_P(Into, Pack, ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf));

TEST_P(Pack, WritesItsPlaceAndNothingElse) {
  pack_one(packed_, 2, 4, at::arange(4, at::kFloat).view({2, 2}));
  EXPECT_THAT(values(packed_), ::testing::ElementsAre(9, 9, 0, 1, 2, 3, 9, 9));
}

TEST_P(Pack, ReadsATransposedTensorInItsOwnOrder) {
  pack_one(packed_, 0, 4, at::arange(4, GetParam()).view({2, 2}).t());
  EXPECT_THAT(values(packed_), ::testing::ElementsAre(0, 2, 1, 3, 9, 9, 9, 9));
}

TEST_P(Pack, WritesZerosForWhatIsMissing) {
  pack_one(packed_, 5, 2, at::Tensor());
  EXPECT_THAT(values(packed_), ::testing::ElementsAre(9, 9, 9, 9, 9, 0, 0, 9));
}

TEST_P(Pack, FlagsTellWhichTensorsThereWere) {
  const std::vector<at::Tensor> tensors{at::arange(1), at::Tensor(), at::arange(2)};
  pack_flags(packed_, 1, tensors.data(), 3);
  EXPECT_THAT(values(packed_), ::testing::ElementsAre(9, 1, 0, 1, 9, 9, 9, 9));
}

}  // namespace
}  // namespace dmuon
