#include "kernels/device_newton_schulz.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>

#include "kernels/error.h"

namespace dmuon {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr auto kCpu = c10::DeviceType::CPU;  // as good as any other

class DeviceNewtonSchulzTest : public testing::Test {
 protected:
  ~DeviceNewtonSchulzTest() override { register_device_newton_schulz(kCpu, {}); }

  const at::Tensor x_ = at::ones({3, 5});
};

TEST_F(DeviceNewtonSchulzTest, ServesTensorsOfItsDevice) {
  register_device_newton_schulz(
      kCpu, {.run = [](const at::Tensor& x, const NewtonSchulz&) { return x; }});
  EXPECT_TRUE(newton_schulz(x_, {}).is_same(x_));
}

TEST_F(DeviceNewtonSchulzTest, IsAskedAfterTheChecksAndNotForNothing) {
  register_device_newton_schulz(kCpu, {.run = [](const at::Tensor& x, const NewtonSchulz&) {
                                  ADD_FAILURE();
                                  return x;
                                }});
  EXPECT_THROW(newton_schulz(at::ones({3}), {}), ConfigError);
  EXPECT_EQ(newton_schulz(at::empty({0, 5}), {}).sizes(), at::IntArrayRef({0, 5}));
}

TEST_F(DeviceNewtonSchulzTest, LeavesToATenWhatItDeclines) {
  const at::Tensor want = newton_schulz(x_, {});
  register_device_newton_schulz(
      kCpu, {.run = [](const at::Tensor&, const NewtonSchulz&) { return at::Tensor(); },
             .name = [](int64_t, int64_t, int64_t, const NewtonSchulz&) { return std::string(); }});
  EXPECT_TRUE(at::equal(newton_schulz(x_, {}), want));
  EXPECT_EQ(newton_schulz_kernel_on(kCpu, 1, 3, 5, {}), newton_schulz_kernel(1, 3, 5, {}));
}

TEST_F(DeviceNewtonSchulzTest, NamesItsOwnKernels) {
  register_device_newton_schulz(kCpu,
                                {.name = [](int64_t batch, int64_t, int64_t, const NewtonSchulz&) {
                                  return "theirs/" + std::to_string(batch);
                                }});
  EXPECT_EQ(newton_schulz_kernel_on(kCpu, 7, 3, 5, {}), "theirs/7");
}

TEST_F(DeviceNewtonSchulzTest, NamesALibraryThatDoesNotLoad) {
  EXPECT_THAT([] { load_device_newton_schulz("/nowhere/libdmuon_cuda.so"); },
              ThrowsMessage<RuntimeFailure>(
                  AllOf(HasSubstr("/nowhere/libdmuon_cuda.so"), HasSubstr("No such file"))));
  EXPECT_THAT([] { load_device_newton_schulz("libm.so.6"); },
              ThrowsMessage<RuntimeFailure>(HasSubstr("no symbol dmuon_device_library")));
}

}  // namespace
}  // namespace dmuon
