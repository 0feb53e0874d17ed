#include "kernels/cuda/newton_schulz_cuda.h"
#include "kernels/device_newton_schulz.h"

extern "C" __attribute__((visibility("default"))) const dmuon::DeviceLibrary*
dmuon_device_library() {
  static const dmuon::DeviceLibrary library{
      DMUON_BUILD, c10::DeviceType::CUDA, {dmuon::cuda::newton_schulz, dmuon::cuda::kernel_name}};
  return &library;
}
