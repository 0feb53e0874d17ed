#include "engine/buffer.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>

namespace dmuon {
namespace {

TEST(FlatBuffer, HoldsNoMemoryUntilAllocatedAndAfterFree) {
  FlatBuffer buffer(1000, at::kFloat, at::kCPU);
  EXPECT_FALSE(buffer.allocated());
  EXPECT_EQ(buffer.flat().storage().nbytes(), 0u);
  buffer.allocate();
  EXPECT_EQ(buffer.flat().storage().nbytes(), 4000u);
  buffer.free();
  EXPECT_EQ(buffer.flat().storage().nbytes(), 0u);
}

TEST(FlatBuffer, ViewsMadeBeforeSeeWhatIsAllocatedLater) {
  FlatBuffer buffer(6, at::kFloat, at::kCPU);
  const at::Tensor view = buffer.view(2, {2, 2});
  buffer.allocate();
  buffer.flat().copy_(at::arange(6, at::kFloat));
  EXPECT_EQ(view[1][1].item<float>(), 5);
}

TEST(FlatBuffer, OfNothingIsAlwaysAllocated) {
  FlatBuffer buffer(0, at::kFloat, at::kCPU);
  EXPECT_TRUE(buffer.allocated());
}

TEST(Placeholder, IsNanOfTheFullShapeInFourBytes) {
  const at::Tensor placeholder = make_placeholder(at::ones({300, 200}));
  EXPECT_EQ(placeholder.numel(), 60000);
  EXPECT_EQ(placeholder.storage().nbytes(), 4u);
  EXPECT_TRUE(at::isnan(placeholder.sum()).item<bool>());
}

TEST(Show, ChangesWhatAParameterHoldsAndNotWhichOneItIs) {
  at::Tensor parameter = at::ones({2, 3}).set_requires_grad(true);
  const auto* identity = parameter.unsafeGetTensorImpl();
  const auto version = parameter._version();
  FlatBuffer buffer(6, at::kBFloat16, at::kCPU);
  buffer.allocate();
  buffer.flat().fill_(4);
  show(parameter, buffer.view(0, {2, 3}));
  EXPECT_EQ(parameter.unsafeGetTensorImpl(), identity);
  EXPECT_EQ(parameter._version(), version);
  EXPECT_EQ(parameter.scalar_type(), at::kBFloat16);
  EXPECT_EQ(parameter.detach().sum().item<float>(), 24);
  EXPECT_TRUE(parameter.is_leaf() && parameter.requires_grad());
}

}  // namespace
}  // namespace dmuon
