#include "engine/transport.h"

namespace dmuon {
namespace {

class LocalTransport final : public Transport {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void broadcast(const std::vector<Broadcast>&, const std::string&) override {}
  void exchange(at::Tensor, const std::vector<int64_t>&, at::Tensor, const std::vector<int64_t>&,
                const std::string&) override {}
  void all_reduce(at::Tensor, ReduceOp, const std::string&) override {}
  void all_gather(at::Tensor out, at::Tensor in, const std::string&) override {
    out.view({-1}).copy_(in.view({-1}));
  }
  void abort(const std::string&) override {}
};

}  // namespace

std::unique_ptr<Transport> make_local_transport() { return std::make_unique<LocalTransport>(); }

}  // namespace dmuon
