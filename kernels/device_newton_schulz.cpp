#include "kernels/device_newton_schulz.h"

#include <dlfcn.h>

#include <array>
#include <cstring>

#include "kernels/error.h"

namespace dmuon {
namespace {

DeviceNewtonSchulz& registered(c10::DeviceType type) {
  constexpr auto kTypes = static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES);
  static std::array<DeviceNewtonSchulz, kTypes> functions;
  return functions.at(static_cast<size_t>(type));
}

[[noreturn]] void fail_to_load(const std::string& path, const std::string& why) {
  throw RuntimeFailure(message("cannot load Newton-Schulz for a device from '", path, "': ", why,
                               ". Rebuild it together with this dmuon, or go without."));
}

const DeviceLibrary& opened(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail_to_load(path, dlerror());
  void* symbol = dlsym(library, kDeviceLibrarySymbol);
  if (symbol == nullptr) fail_to_load(path, message("no symbol ", kDeviceLibrarySymbol));
  return *reinterpret_cast<const DeviceLibrary* (*)()>(symbol)();
}

}  // namespace

void register_device_newton_schulz(c10::DeviceType type, DeviceNewtonSchulz functions) {
  registered(type) = functions;
}

at::Tensor newton_schulz_on_device(const at::Tensor& x, const NewtonSchulz& options) {
  const auto run = registered(x.device().type()).run;
  return run == nullptr ? at::Tensor() : run(x, options);
}

std::string newton_schulz_kernel_on(c10::DeviceType type, int64_t batch, int64_t rows, int64_t cols,
                                    const NewtonSchulz& options) {
  const auto name = registered(type).name;
  const std::string known = name == nullptr ? "" : name(batch, rows, cols, options);
  return known.empty() ? newton_schulz_kernel(batch, rows, cols, options) : known;
}

const char* device_library_build() { return DMUON_BUILD; }

void load_device_newton_schulz(const std::string& path) {
  const DeviceLibrary& library = opened(path);
  if (std::strcmp(library.build, device_library_build()) != 0) {
    fail_to_load(path, message("it is of build '", library.build, "', this is '",
                               device_library_build(), "'"));
  }
  register_device_newton_schulz(library.type, library.functions);
}

}  // namespace dmuon
