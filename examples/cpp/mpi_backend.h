// c10d collectives over MPI, for CPU tensors: what a C++ program can have where torch's own
// backends cannot be constructed (the wheels ship no gloo headers).
//
// Every call blocks its thread until it is done. Groups are issued to by different threads at a
// time, so MPI runs with MPI_THREAD_MULTIPLE.
#pragma once
#include <mpi.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace example {

// MPI from here to the end of the scope. Make it first: groups must be gone before it ends.
class MpiSession {
 public:
  MpiSession(int& argc, char**& argv);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;
};

class MpiBackend final : public c10d::Backend {
 public:
  explicit MpiBackend(MPI_Comm comm);  // works on a copy of it; collective
  ~MpiBackend() override;

  const std::string getBackendName() const override { return "mpi"; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  // All ranks in their order, which is all that dmuon asks for.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& out, at::Tensor& in,
                                               std::vector<int64_t>& out_splits,
                                               std::vector<int64_t>& in_splits,
                                               const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

 private:
  MPI_Comm comm_;
};

// All processes of the job. Collective.
c10::intrusive_ptr<c10d::ProcessGroup> make_mpi_group(MPI_Comm comm = MPI_COMM_WORLD);

}  // namespace example
