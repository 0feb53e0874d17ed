# torch::c10 and torch::cpu, from the torch that Python_EXECUTABLE would import, found without
# importing it, or from DMUON_TORCH_ROOT, the folder with its include/ and lib/ (a LibTorch archive
# will do). find_package(Torch) is not used: against a CUDA wheel it fails where no matching CUDA
# toolkit is installed. Used to build dmuon, and by whoever finds its package.

if(NOT DMUON_TORCH_ROOT)
  if(NOT Python_EXECUTABLE)
    find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
  endif()
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "
import importlib.util, pathlib, sys
spec = importlib.util.find_spec('torch')
if spec is None: sys.exit(1)
print(pathlib.Path(spec.origin).parent, end='')"
    OUTPUT_VARIABLE TORCH_ROOT
    RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR
      "${Python_EXECUTABLE} has no torch. Install torch 2.11 to 2.15 there first, and build with "
      "`pip install --no-build-isolation .`, which lets the build see it. For C++ alone, "
      "-DDMUON_TORCH_ROOT=<folder> names a LibTorch.")
  endif()
else()
  set(TORCH_ROOT ${DMUON_TORCH_ROOT})
endif()

set(version_header ${TORCH_ROOT}/include/torch/headeronly/version.h)
if(NOT EXISTS ${version_header})
  set(version_header ${TORCH_ROOT}/include/torch/csrc/api/include/torch/version.h)
endif()
file(STRINGS ${version_header} TORCH_MINOR REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
list(TRANSFORM TORCH_MINOR REPLACE "[^0-9]" "")
list(JOIN TORCH_MINOR "." TORCH_MINOR)
if(TORCH_MINOR VERSION_LESS 2.11 OR TORCH_MINOR VERSION_GREATER 2.15)
  message(FATAL_ERROR "torch ${TORCH_MINOR} was found; dmuon supports 2.11 to 2.15.")
endif()
message(STATUS "torch ${TORCH_MINOR}: ${TORCH_ROOT}")

function(dmuon_import_torch target library)
  add_library(torch::${target} SHARED IMPORTED GLOBAL)
  set_target_properties(torch::${target} PROPERTIES
    IMPORTED_LOCATION ${TORCH_ROOT}/lib/lib${library}.so
    INTERFACE_INCLUDE_DIRECTORIES
      "${TORCH_ROOT}/include;${TORCH_ROOT}/include/torch/csrc/api/include")
endfunction()

dmuon_import_torch(c10 c10)
dmuon_import_torch(cpu torch_cpu)
target_link_libraries(torch::cpu INTERFACE torch::c10)
