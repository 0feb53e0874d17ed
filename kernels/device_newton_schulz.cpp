#include "kernels/device_newton_schulz.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstring>

#include "kernels/error.h"

namespace dmuon {
namespace {

using Registry = std::array<std::atomic<DeviceNewtonSchulz>,
                            static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES)>;

Registry& registry() {
  static Registry functions{};
  return functions;
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

void register_device_newton_schulz(c10::DeviceType type, DeviceNewtonSchulz function) {
  registry()[static_cast<size_t>(type)] = function;
}

DeviceNewtonSchulz device_newton_schulz(c10::DeviceType type) {
  return registry()[static_cast<size_t>(type)];
}

const char* device_library_build() { return DMUON_BUILD; }

void load_device_newton_schulz(const std::string& path) {
  const DeviceLibrary& library = opened(path);
  if (std::strcmp(library.build, device_library_build()) != 0) {
    fail_to_load(path, message("it is of build '", library.build, "', this is '",
                               device_library_build(), "'"));
  }
  register_device_newton_schulz(library.type, library.newton_schulz);
}

}  // namespace dmuon
