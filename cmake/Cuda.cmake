# For DMUON_CUDA: CUDA::cudart, CUDA::cublasLt, torch::cuda. Any CUDA 13 toolkit serves any torch
# built for CUDA 13: within a major version the libraries stay compatible, and torch's are loaded.

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90)  # and, as PTX, what comes after
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # torch's
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "DMUON_CUDA needs nvcc, and none was found. Put it on PATH, or name it by "
    "-DCMAKE_CUDA_COMPILER=<path>, or build with -DDMUON_CUDA=OFF.")
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
if(NOT EXISTS ${TORCH_ROOT}/lib/libtorch_cuda.so)
  message(FATAL_ERROR "DMUON_CUDA needs a torch built for CUDA, and ${TORCH_ROOT} is not. Install "
    "such a wheel, or build with -DDMUON_CUDA=OFF.")
endif()

file(STRINGS ${TORCH_ROOT}/version.py torch_cuda REGEX "^cuda.*'[0-9]+\\.")
string(REGEX MATCH "[0-9]+\\.[0-9]+" torch_cuda "${torch_cuda}")
string(REGEX MATCH "^[0-9]+" torch_cuda_major "${torch_cuda}")
message(STATUS "CUDA: toolkit ${CUDAToolkit_VERSION}, torch's ${torch_cuda}")
if(torch_cuda_major AND NOT torch_cuda_major EQUAL CUDAToolkit_VERSION_MAJOR)
  message(FATAL_ERROR "torch was built for CUDA ${torch_cuda} and the toolkit is "
    "${CUDAToolkit_VERSION}; both must be of one major version. Name another nvcc by "
    "-DCMAKE_CUDA_COMPILER=<path>, or build with -DDMUON_CUDA=OFF.")
endif()

dmuon_import_torch(c10_cuda c10_cuda)
dmuon_import_torch(cuda torch_cuda)
target_link_libraries(torch::cuda INTERFACE torch::c10_cuda torch::cpu CUDA::cudart)
