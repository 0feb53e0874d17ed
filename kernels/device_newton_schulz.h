// Where other devices than the CPU join newton_schulz: a library that was built for one registers a
// function here. Without it a tensor there is served by ATen's own products.
//
// kernels/ has no header of any device. A device's library is a shared one, opened at run time, so
// that one build of the rest serves machines with and without it. It exports one C function, named
// kDeviceLibrarySymbol, of type DeviceLibrary().
#pragma once
#include <c10/core/DeviceType.h>

#include <string>

#include "kernels/newton_schulz.h"

namespace dmuon {

struct DeviceNewtonSchulz {
  // As newton_schulz, but x is neither empty nor of another device, and options are valid. Enqueues
  // on the current stream of x's device. An undefined tensor: not for this x; ATen then does it.
  at::Tensor (*run)(const at::Tensor& x, const NewtonSchulz& options) = nullptr;

  // As newton_schulz_kernel, for the current device and float32. Empty: ATen does it.
  std::string (*name)(int64_t batch, int64_t rows, int64_t cols,
                      const NewtonSchulz& options) = nullptr;
};

// One per device type, and the last registered counts; {} takes it out. Not while another thread
// runs Newton-Schulz.
void register_device_newton_schulz(c10::DeviceType type, DeviceNewtonSchulz functions);

// Asks what is registered for x's device; undefined where nothing is.
at::Tensor newton_schulz_on_device(const at::Tensor& x, const NewtonSchulz& options);

// newton_schulz_kernel for tensors on such a device.
std::string newton_schulz_kernel_on(c10::DeviceType type, int64_t batch, int64_t rows, int64_t cols,
                                    const NewtonSchulz& options);

// Objects of C++ cross the border, so both sides must come from one build: `build` is compared.
struct DeviceLibrary {
  const char* build;  // device_library_build() of the side that was compiled
  c10::DeviceType type;
  DeviceNewtonSchulz functions;
};

inline constexpr const char* kDeviceLibrarySymbol = "dmuon_device_library";

// Opens the library, for good, and registers what it has. Throws RuntimeFailure: no such file, a
// library that it needs is missing, no such symbol, another build.
void load_device_newton_schulz(const std::string& path);

// dmuon's and torch's versions.
const char* device_library_build();

}  // namespace dmuon
