#include "mpi_backend.h"

#include <limits>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

// torch 2.14 renamed collectives; the older names exist in every version from 2.11 on.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace example {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class Done final : public c10d::Work {
 public:
  using Work::Work;
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

WorkPtr done(int rank, c10d::OpType type) { return c10::make_intrusive<Done>(rank, type); }

MPI_Datatype type_of(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous(),
              "the MPI backend takes contiguous CPU tensors");
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return MPI_FLOAT;
    case at::kDouble:
      return MPI_DOUBLE;
    case at::kInt:
      return MPI_INT32_T;
    case at::kLong:
      return MPI_INT64_T;
    case at::kByte:
      return MPI_UINT8_T;
    default:
      TORCH_CHECK(false, "the MPI backend does not know ", tensor.scalar_type());
  }
}

MPI_Op op_of(const c10d::ReduceOp& op) {
  if (op.op_ == c10d::ReduceOp::SUM) return MPI_SUM;
  TORCH_CHECK(op.op_ == c10d::ReduceOp::MAX, "the MPI backend has SUM and MAX only");
  return MPI_MAX;
}

int as_count(int64_t count) {
  TORCH_CHECK(count <= std::numeric_limits<int>::max(), count, " elements are too many for MPI");
  return static_cast<int>(count);
}

int rank_in(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = 0;
  MPI_Comm_size(comm, &size);
  return size;
}

// Elements for each rank, and where they begin.
struct Splits {
  Splits(const std::vector<int64_t>& given, const at::Tensor& tensor, int ranks) {
    const int64_t row =
        tensor.dim() > 1 ? tensor.numel() / std::max<int64_t>(1, tensor.size(0)) : 1;
    int64_t at = 0;
    for (int r = 0; r < ranks; ++r) {
      const int64_t count = given.empty() ? tensor.numel() / ranks : given[r] * row;
      counts.push_back(as_count(count));
      offsets.push_back(as_count(at));
      at += count;
    }
  }
  std::vector<int> counts, offsets;
};

}  // namespace

MpiSession::MpiSession(int& argc, char**& argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  if (provided == MPI_THREAD_MULTIPLE) return;
  MPI_Finalize();
  throw std::runtime_error("this MPI has no MPI_THREAD_MULTIPLE, which dmuon needs");
}

MpiSession::~MpiSession() { MPI_Finalize(); }

MpiBackend::MpiBackend(MPI_Comm comm) : Backend(rank_in(comm), size_of(comm)) {
  MPI_Comm_dup(comm, &comm_);
}

MpiBackend::~MpiBackend() { MPI_Comm_free(&comm_); }

c10::intrusive_ptr<c10d::Backend::Options> MpiBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName());
}

c10::intrusive_ptr<c10d::Backend> MpiBackend::split(const c10::intrusive_ptr<c10d::Store>&,
                                                    const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<Options>&) {
  TORCH_CHECK(static_cast<int>(ranks.size()) == getSize(), "this backend splits into all ranks");
  return c10::make_intrusive<MpiBackend>(comm_);
}

WorkPtr MpiBackend::broadcast(std::vector<at::Tensor>& tensors,
                              const c10d::BroadcastOptions& options) {
  at::Tensor& tensor = tensors.at(0);
  MPI_Bcast(tensor.data_ptr(), as_count(tensor.numel()), type_of(tensor),
            static_cast<int>(options.rootRank), comm_);
  return done(getRank(), c10d::OpType::BROADCAST);
}

WorkPtr MpiBackend::allreduce(std::vector<at::Tensor>& tensors,
                              const c10d::AllreduceOptions& options) {
  at::Tensor& tensor = tensors.at(0);
  MPI_Allreduce(MPI_IN_PLACE, tensor.data_ptr(), as_count(tensor.numel()), type_of(tensor),
                op_of(options.reduceOp), comm_);
  return done(getRank(), c10d::OpType::ALLREDUCE);
}

WorkPtr MpiBackend::_allgather_base(at::Tensor& out, at::Tensor& in,
                                    const c10d::AllgatherOptions&) {
  const int count = as_count(in.numel());
  MPI_Allgather(in.data_ptr(), count, type_of(in), out.data_ptr(), count, type_of(out), comm_);
  return done(getRank(), c10d::OpType::_ALLGATHER_BASE);
}

WorkPtr MpiBackend::alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                                  std::vector<int64_t>& in_splits, const c10d::AllToAllOptions&) {
  const Splits to(in_splits, in, getSize()), from(out_splits, out, getSize());
  MPI_Alltoallv(in.data_ptr(), to.counts.data(), to.offsets.data(), type_of(in), out.data_ptr(),
                from.counts.data(), from.offsets.data(), type_of(out), comm_);
  return done(getRank(), c10d::OpType::ALLTOALL_BASE);
}

WorkPtr MpiBackend::barrier(const c10d::BarrierOptions&) {
  MPI_Barrier(comm_);
  return done(getRank(), c10d::OpType::BARRIER);
}

c10::intrusive_ptr<c10d::ProcessGroup> make_mpi_group(MPI_Comm comm) {
  auto backend = c10::make_intrusive<MpiBackend>(comm);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(),
                                                       backend->getRank(), backend->getSize());
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

}  // namespace example
