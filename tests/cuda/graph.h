// A CUDA graph of what a function enqueues.
#pragma once
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace dmuon {

// Captures on a stream of its own. Tensors made inside stay valid while `graph` lives.
template <class F>
void capture(at::cuda::CUDAGraph& graph, F enqueue) {
  c10::cuda::device_synchronize();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  graph.capture_begin();
  enqueue();
  graph.capture_end();
}

}  // namespace dmuon
