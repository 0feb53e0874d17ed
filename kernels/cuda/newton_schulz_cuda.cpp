#include "kernels/cuda/newton_schulz_cuda.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include "kernels/cuda/problem.h"

namespace dmuon::cuda {
namespace {

constexpr int kLowestCapability = 8;

int attribute(cudaDeviceAttr which) {
  int value = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, c10::cuda::current_device()));
  return value;
}

bool served() { return attribute(cudaDevAttrComputeCapabilityMajor) >= kLowestCapability; }

bool takes(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

const char* name_of(Element element) {
  if (element == Element::float16) return "float16";
  return element == Element::bfloat16 ? "bfloat16" : "float32";
}

std::string described(const Problem& problem) {
  std::ostringstream text;
  text << problem.batch << " x " << problem.rows << " x " << problem.cols;
  return text.str();
}

std::optional<Executor> new_executor(const Problem& problem) {
  Machine machine = current_machine();
  const cublasLtHandle_t library = at::cuda::getCurrentCUDABlasLtHandle();
  Plan plan = make_plan(problem, machine);
  const bool blocks = plan.blocks > 1;
  std::optional<Executor> executor = Executor::make(std::move(plan), library, machine);
  if (executor || !blocks) return executor;
  TORCH_WARN("cuBLASLt has no product by pointer arrays for Newton-Schulz of ", described(problem),
             ": symmetric products are computed whole, which is slower.");
  machine.pointer_arrays = false;
  return Executor::make(make_plan(problem, machine), library, machine);
}

// Never destroyed: at exit the library that its descriptors belong to may be gone.
class Executors {
 public:
  const std::optional<Executor>& find(const Problem& problem) {
    const std::pair key(static_cast<int>(c10::cuda::current_device()), problem);
    const std::lock_guard lock(mutex_);
    const auto known = executors_.find(key);
    if (known != executors_.end()) return known->second;
    std::optional<Executor> executor = new_executor(problem);
    if (!executor) {
      TORCH_WARN("cuBLASLt has no algorithm for Newton-Schulz of ", described(problem),
                 ": torch's products are used instead.");
    }
    return executors_.emplace(key, std::move(executor)).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, Problem>, std::optional<Executor>> executors_;
};

Executors& executors() {
  static auto* all = new Executors;
  return *all;
}

}  // namespace

Machine current_machine() { return {.multiprocessors = attribute(cudaDevAttrMultiProcessorCount)}; }

at::Tensor run(const Executor& executor, const at::Tensor& x) {
  at::Tensor out = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  const at::Tensor workspace =
      at::empty({executor.plan().workspace_bytes}, x.options().dtype(at::kByte));
  const Buffers buffers{x.const_data_ptr(), out.mutable_data_ptr<float>(),
                        static_cast<char*>(workspace.mutable_data_ptr())};
  executor.run(at::cuda::getCurrentCUDABlasLtHandle(), buffers,
               c10::cuda::getCurrentCUDAStream().stream());
  return out;
}

at::Tensor newton_schulz(const at::Tensor& x, const NewtonSchulz& options) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (!takes(x.scalar_type()) || !served()) return {};
  const std::optional<Executor>& executor = executors().find(problem_of(x, options));
  return executor ? run(*executor, x.contiguous()) : at::Tensor();
}

std::string kernel_name(int64_t batch, int64_t rows, int64_t cols, const NewtonSchulz& options) {
  if (batch * rows * cols == 0 || !served()) return "";
  const auto& executor = executors().find(problem_of(batch, rows, cols, options));
  if (!executor) return "";
  const Plan& plan = executor->plan();
  std::ostringstream name;
  name << (plan.gram ? "gram/cublaslt" : "direct/cublaslt");
  if (plan.blocks > 1) name << ", " << plan.blocks << " blocks";
  name << '/' << name_of(plan.problem.x);
  return name.str();
}

}  // namespace dmuon::cuda
