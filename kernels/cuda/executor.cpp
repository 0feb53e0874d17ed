#include "kernels/cuda/executor.h"

#include <utility>

#include "kernels/cuda/launch.h"
#include "kernels/error.h"

namespace dmuon::cuda {
namespace {

void require_launched(cudaError_t error, const char* kernel) {
  if (error == cudaSuccess) return;
  throw RuntimeFailure(message("Newton-Schulz on CUDA could not launch its ", kernel,
                               " kernel: ", cudaGetErrorString(error),
                               ". Was dmuon built for this GPU (sm_80, sm_90 and newer)?"));
}

}  // namespace

class Executor::Runner {
 public:
  Runner(const Executor& executor, cublasLtHandle_t library, const Buffers& buffers,
         cudaStream_t stream)
      : executor_(executor),
        plan_(executor.plan_),
        library_(library),
        buffers_(buffers),
        stream_(stream) {}

  void operator()(const Import& step) const {
    const Matrix& input = plan_[Name::input];
    auto* partials = at<double>(plan_.partials);
    auto* factors = at<double>(plan_.factors);
    require_launched(launch_squares(input.element, buffers_.input, plan_.problem.batch,
                                    input.elements(), plan_.chunks, partials, stream_),
                     "norm");
    require_launched(launch_factors(partials, plan_.problem.batch, plan_.chunks, factors, stream_),
                     "norm");
    require_launched(
        launch_import(input.element, buffers_.input, shape(input), factors, step.scale,
                      plan_[step.to].element, data(step.to), shape(plan_[step.to]), stream_),
        "scaling");
  }

  void operator()(const Product& step) const {
    const LtMatmul& product = executor_.products_.at(column_major(plan_, step));
    const auto alpha = static_cast<float>(step.alpha), beta = static_cast<float>(step.beta);
    product.run(library_, alpha, beta, operands(step), at<void>(plan_.library), stream_);
  }

  void operator()(const Finish& step) const {
    const Matrix& matrix = plan_[step.of];
    void* also = step.also == step.of ? nullptr : data(step.also);
    require_launched(
        launch_finish(matrix.element, data(step.of), also, plan_.problem.batch, matrix.rows,
                      static_cast<float>(step.diagonal), step.mirror, stream_),
        "mirror");
  }

  void operator()(const Convert& step) const { copy(step.from, step.to, 1); }
  void operator()(const Export& step) const { copy(step.from, Name::output, step.scale); }

 private:
  template <class T>
  T* at(int64_t offset) const {
    return static_cast<T*>(static_cast<void*>(buffers_.workspace + offset));
  }

  void* data(Name name) const {
    return name == Name::output ? buffers_.output : at<void>(plan_[name].offset);
  }

  Shape shape(const Matrix& matrix) const {
    return {plan_.problem.batch, matrix.rows, matrix.cols};
  }

  Operands operands(const Product& step) const {
    if (step.list < 0) return {data(step.b), data(step.a), data(step.c), data(step.d)};
    const BlockList& list = plan_.lists[static_cast<size_t>(step.list)];
    void** a = at<void*>(list.pointers);
    return {a + list.size(), a, a + 2 * list.size(), a + 3 * list.size()};
  }

  void copy(Name from, Name to, double scale) const {
    require_launched(
        launch_copy(plan_[from].element, data(from), shape(plan_[from]), static_cast<float>(scale),
                    plan_[to].element, data(to), shape(plan_[to]), stream_),
        "copy");
  }

  const Executor& executor_;
  const Plan& plan_;
  cublasLtHandle_t library_;
  const Buffers& buffers_;
  cudaStream_t stream_;
};

std::optional<Executor> Executor::make(Plan plan, cublasLtHandle_t library,
                                       const Machine& machine) {
  Executor executor(std::move(plan));
  for (const Step& step : executor.plan_.steps) {
    const Product* product = std::get_if<Product>(&step);
    if (product == nullptr) continue;
    const MatmulCall call = column_major(executor.plan_, *product);
    const auto [entry, added] = executor.products_.try_emplace(call, call);
    if (!added) continue;
    if (!entry->second.choose_algorithm(library, static_cast<size_t>(machine.library_bytes))) {
      return std::nullopt;
    }
  }
  return executor;
}

void Executor::run(cublasLtHandle_t library, const Buffers& buffers, cudaStream_t stream) const {
  if (!plan_.lists.empty()) {
    require_launched(launch_pointers(plan_.lists.data(), static_cast<int64_t>(plan_.lists.size()),
                                     buffers.workspace, stream),
                     "pointer");
  }
  const Runner runner(*this, library, buffers, stream);
  for (const Step& step : plan_.steps) std::visit(runner, step);
}

}  // namespace dmuon::cuda
