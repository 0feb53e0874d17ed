#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"

namespace dmuon::cuda {
namespace {

constexpr int kTile = 32;
constexpr int kRows = 8;  // a block of kTile x kRows threads walks down a tile

template <class T>
struct Square {
  T* of;
  T* also;  // null: none
  int64_t order;
  float diagonal;

  __device__ bool holds(int64_t row, int64_t col) const { return row < order && col < order; }

  __device__ void write_also(int64_t row, int64_t col, T value) const {
    if (also == nullptr) return;
    const float added = row == col ? diagonal : 0.0f;
    also[row * order + col] = from_float<T>(to_float(value) + added);
  }
};

template <class T>
__global__ void add_diagonal_kernel(Square<T> square, int64_t batch) {
  const int64_t elements = square.order * square.order;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (col >= square.order) return;
  for (int64_t matrix = blockIdx.z; matrix < batch; matrix += gridDim.z) {
    Square<T> one = square;
    one.of += matrix * elements;
    one.also += matrix * elements;
    for (int64_t row = blockIdx.y; row < square.order; row += gridDim.y) {
      one.write_also(row, col, one.of[row * one.order + col]);
    }
  }
}

// Tile (i, j), i >= j, is read once, through shared memory, so that reads and writes both run along
// rows. On the diagonal what lies above comes from below.
template <class T>
__device__ void mirror_tile(const Square<T>& square, BlockIndex tile,
                            T (&shared)[kTile][kTile + 1]) {
  const int64_t top = tile.row * kTile, left = tile.col * kTile;
  const int x = static_cast<int>(threadIdx.x);
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kRows) {
    if (!square.holds(top + y, left + x)) continue;
    shared[y][x] = square.of[(top + y) * square.order + left + x];
    if (top != left) square.write_also(top + y, left + x, shared[y][x]);
  }
  __syncthreads();
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kRows) {
    if (!square.holds(left + y, top + x)) continue;
    const T value = top == left && x < y ? shared[y][x] : shared[x][y];
    square.of[(left + y) * square.order + top + x] = value;
    square.write_also(left + y, top + x, value);
  }
}

template <class T>
__global__ void mirror_kernel(Square<T> square, int64_t batch) {
  __shared__ T shared[kTile][kTile + 1];
  const int64_t elements = square.order * square.order;
  for (int64_t matrix = blockIdx.z; matrix < batch; matrix += gridDim.z) {
    Square<T> one = square;
    one.of += matrix * elements;
    if (one.also != nullptr) one.also += matrix * elements;
    mirror_tile(one, lower_block(blockIdx.x), shared);
    __syncthreads();
  }
}

template <class T>
void launch_mirror(const Square<T>& square, int64_t batch, cudaStream_t stream) {
  const int64_t tiles = lower_blocks((square.order + kTile - 1) / kTile);
  const dim3 grid(static_cast<unsigned>(tiles), 1, at_most(batch, kMostBlocks));
  mirror_kernel<<<grid, dim3(kTile, kRows), 0, stream>>>(square, batch);
}

template <class T>
void launch_add_diagonal(const Square<T>& square, int64_t batch, cudaStream_t stream) {
  if (square.also == nullptr) return;
  add_diagonal_kernel<<<grid_over(batch, square.order, square.order), kThreads, 0, stream>>>(square,
                                                                                             batch);
}

}  // namespace

cudaError_t launch_finish(Element element, void* of, void* also, int64_t batch, int64_t order,
                          float diagonal, bool mirror, cudaStream_t stream) {
  with_element(element, [&](auto type) {
    using T = typename decltype(type)::type;
    const Square<T> square{static_cast<T*>(of), static_cast<T*>(also), order, diagonal};
    mirror ? launch_mirror(square, batch, stream) : launch_add_diagonal(square, batch, stream);
  });
  return cudaGetLastError();
}

}  // namespace dmuon::cuda
