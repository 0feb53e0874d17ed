#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"

namespace dmuon::cuda {
namespace {

constexpr int kLists = 16;

// By value, so that nothing is copied to the device: a CUDA graph keeps kernel arguments.
struct Lists {
  BlockList list[kLists];
};

__global__ void pointers_kernel(Lists lists, char* workspace) {
  const BlockList& list = lists.list[blockIdx.y];
  const int64_t size = list.size();
  char** pointers = reinterpret_cast<char**>(workspace + list.pointers);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < size;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const BlockOffsets at = block_offsets(list, i);
    pointers[i] = workspace + at.a;
    pointers[size + i] = workspace + at.b;
    pointers[2 * size + i] = workspace + at.c;
    pointers[3 * size + i] = workspace + at.d;
  }
}

}  // namespace

cudaError_t launch_pointers(const BlockList* lists, int64_t count, void* workspace,
                            cudaStream_t stream) {
  for (int64_t begin = 0; begin < count; begin += kLists) {
    const int64_t here = count - begin < kLists ? count - begin : kLists;
    Lists some{};
    for (int64_t i = 0; i < here; ++i) some.list[i] = lists[begin + i];
    const dim3 grid(at_most((some.list[0].size() + kThreads - 1) / kThreads, 1024),
                    static_cast<unsigned>(here));
    pointers_kernel<<<grid, kThreads, 0, stream>>>(some, static_cast<char*>(workspace));
  }
  return cudaGetLastError();
}

}  // namespace dmuon::cuda
