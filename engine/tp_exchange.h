// What moves between the TP ranks of an owner's cell, one all-to-all per unit and direction:
// gradients to each matrix's TP owner, and the pieces of its update back.
//
// Collective over the tp group of the cell that owns slots; where a rank owns none of the unit's
// slots all its TP peers own none, and nothing is called.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/transport.h"
#include "engine/unit_store.h"

namespace dmuon {

// Memory for messages. Shared: one buffer that its users take in turn, kept at the size of the
// largest; else memory of its own for each. Not thread-safe: one lane uses it.
class Staging {
 public:
  explicit Staging(bool shared = false) : shared_(shared) {}
  at::Tensor take(int64_t numel, const at::TensorOptions& options);

  bool shared() const { return shared_; }

 private:
  bool shared_;
  at::Tensor buffer_;
};

// Indices into the unit's slots of those that take part.
std::vector<int> gathering_slots(const UnitStore& unit);
std::vector<int> scattering_slots(const UnitStore& unit);
std::vector<int> slots_in_shards(const UnitStore& unit);

// The pieces of some slots that cross between this TP rank and the others, in the order in which
// they lie in a message: by rank, then by slot. A piece has one element behind it: 1 where there is
// one.
class Pieces {
 public:
  Pieces(const UnitStore& unit, std::vector<int> slots, int tp, int tp_size);

  const std::vector<int>& slots() const { return slots_; }
  const Slot& slot(size_t i) const;
  int64_t numel(size_t i, int tp) const;

  // f(i, offset) for this rank's pieces of what others lead; f(i, rank, offset) for the others'
  // pieces of what this rank leads. `i`: into slots().
  template <class F>
  void for_each_of_mine(const F& f) const;
  template <class F>
  void for_each_of_others(const F& f) const;

  // Elements per TP rank.
  std::vector<int64_t> mine() const;
  std::vector<int64_t> of_others() const;

 private:
  const UnitStore& unit_;
  std::vector<int> slots_;
  int tp_, tp_size_;
};

// Elements that one exchange of the unit stages on this rank: sent and received.
int64_t gather_elements(const UnitStore& unit, int tp, int tp_size);
int64_t scatter_elements(const UnitStore& unit, int tp, int tp_size);

// `gradients`: this rank's shards, one per gathering slot, undefined where there is none. Returns,
// parallel, the whole gradients on their TP owners, float32; undefined elsewhere, and where no rank
// had a shard.
std::vector<at::Tensor> gather_gradients(const UnitStore& unit,
                                         const std::vector<at::Tensor>& gradients, Transport& tp,
                                         Staging& staging);

// An exchange of updates that has been issued.
class UpdateScatter {
 public:
  // `updates`: one per scattering slot, whole, float32, on its TP owner; undefined elsewhere, and
  // where there is none.
  UpdateScatter(const UnitStore& unit, const std::vector<at::Tensor>& updates, Transport& tp,
                Staging& staging);

  // Waits. Parallel to the slots: this rank's piece, in the parameter's sizes; undefined where the
  // TP owner had none.
  std::vector<at::Tensor> finish();

 private:
  Pieces pieces_;
  std::vector<at::Tensor> results_;
  at::Tensor sent_, received_;
  std::unique_ptr<Pending> pending_;
};

}  // namespace dmuon
