// Newton-Schulz of a unit's matrices whose gradients stay in their TP shards: Gram matrices go to
// each matrix's TP owner, factors come back (kernels/sharded_gram.h), all of the unit's in one
// all-to-all each way and round.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "engine/plan.h"
#include "engine/transport.h"
#include "engine/unit_store.h"
#include "kernels/sharded_gram.h"

namespace dmuon {

// Muon's tp_distributed_gram: nowhere, where it moves fewer bytes, wherever it can.
enum class ShardedGram { never, beneficial, always };

// How a matrix cut along `layout.dim` is cut as Newton-Schulz sees it; nothing where whole matrices
// of a batch lie on different ranks, or where it is not cut.
std::optional<CutDim> cut_dim(const Matrix& matrix, const TpLayout& layout);

// Whether the policy wants this matrix in shards over `ranks` ranks.
bool stays_in_shards(const Matrix& matrix, const TpLayout& layout, int ranks,
                     const NewtonSchulz& options, ShardedGram policy);

// Bytes that one step moves over the TP axis for this matrix in the whole cell: gathered and
// scattered whole, and in shards.
struct TpBytes {
  int64_t whole = 0, in_shards = 0;
};
TpBytes tp_bytes(const Matrix& matrix, const TpLayout& layout, int tp_owner, int ranks,
                 const NewtonSchulz& options);

class ShardedNewtonSchulz {
 public:
  ShardedNewtonSchulz(const OwnershipPlan& plan, const UnitStore& unit, const NewtonSchulz& options,
                      Transport& tp);

  // This rank's shard of what is to be orthogonalised; undefined where there is none. In the order
  // of the slots, the same slots on every TP rank.
  void add(int slot, const at::Tensor& shard);

  // sharded_gram_rounds times, in this order; collective. The first two issue what the next one
  // waits for; `wait` does so before, for who wants to know how long it takes.
  void wait();
  void send_grams();
  void send_factors();
  void apply_factors();

  struct Result {
    int slot = 0;
    at::Tensor piece;  // in the parameter's sizes; undefined where there was no shard
    bool led = false;  // this rank was the owner, and some rank had a shard
  };
  std::vector<Result> results() const;

 private:
  struct Member {
    int slot = 0;
    int owner = 0;
    int64_t elements = 0;  // of its message: payload or factor, and one element for presence
    std::optional<GramShard> shard;
    std::optional<GramOwner> led;
    at::Tensor mine;  // this rank's payload, then factor
  };

  std::vector<int64_t> to_owners() const;  // elements per TP rank
  std::vector<int64_t> from_members() const;
  int64_t led_elements() const;  // of what this rank leads, between it and each other rank
  void write_gram(Member& member) const;
  std::vector<at::Tensor> payloads_of(const Member& member, const at::Tensor& grams,
                                      int64_t offset) const;
  at::Tensor factor_of(Member& member, const std::vector<at::Tensor>& payloads) const;
  void exchange(const std::vector<int64_t>& send_counts, const std::vector<int64_t>& recv_counts);
  at::Tensor empty_message(int64_t numel) const;

  const OwnershipPlan& plan_;
  const UnitStore& unit_;
  NewtonSchulz options_;
  Transport& tp_;
  std::vector<Member> members_;
  at::Tensor sent_, received_;
  std::unique_ptr<Pending> pending_;
};

}  // namespace dmuon
