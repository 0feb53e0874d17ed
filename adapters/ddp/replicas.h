// Keeps the parameters that dmuon does not own equal on all ranks: after a backward pass every
// rank's gradient is the mean over the ranks. In buckets, beside backward, in one order on all
// ranks whatever each rank's loss reaches: a parameter that no rank reaches keeps its gradient, one
// that some reach counts as zero on the others.
//
// What a pass finds in `grad` is averaged with it, so gradients accumulated without averaging are
// averaged by the first pass that does. Hooks run in backward; the rest on the training thread.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/lane.h"
#include "engine/slot.h"
#include "engine/transport.h"

namespace dmuon {

struct ReplicatedParameter {
  at::Tensor parameter;
  at::Tensor inner;                        // the parameter, or what it wraps on this rank
  std::shared_ptr<TensorWrapper> wrapper;  // null where it is a plain tensor
};

class Replicas : public std::enable_shared_from_this<Replicas> {
 public:
  // In the order of registration, which is the same on every rank.
  Replicas(std::vector<ReplicatedParameter> parameters, std::unique_ptr<Transport> transport,
           std::shared_ptr<Lane> lane, int64_t bucket_bytes = 25 << 20);

  // Rank 0's values on every rank. Collective.
  void broadcast(const std::vector<at::Tensor>& tensors, const std::string& name);

  // Puts hooks on parameters that have become trainable. Before each forward.
  void watch();
  void set_synchronize(bool on) { synchronize_ = on; }
  int64_t reductions() const { return reductions_; }  // of buckets

 private:
  struct Member {
    ReplicatedParameter of;
    int bucket = 0;
    std::optional<AccumulationHook> hook;
    bool expected = false;  // some rank's part of this pass reaches it
    bool counted = false;   // this rank's part: known when the pass began
    bool fired = false;
  };
  struct Bucket {
    std::vector<int> members;
    int pending = 0;
    bool issued = false, fired_again = false;
    at::Tensor flat;
    Event reduced;
  };

  void make_buckets(int64_t bucket_bytes);
  void accumulated(int member);
  void begin_pass();
  void issue_ready();
  void issue(Bucket& bucket);
  void finish(Bucket& bucket);
  void issue_late();
  void end_pass();
  void put(Member& member, const at::Tensor& mean);

  std::vector<Member> members_;
  std::vector<Bucket> buckets_;  // the last registered parameters first, as backward reaches them
  std::unique_ptr<Transport> transport_;
  std::shared_ptr<Lane> lane_;  // of the group, for whoever else uses it
  bool synchronize_ = true;
  bool in_pass_ = false;
  std::weak_ptr<void> pass_alive_;
  size_t next_ = 0;  // bucket to issue
  int64_t reductions_ = 0;
};

}  // namespace dmuon
