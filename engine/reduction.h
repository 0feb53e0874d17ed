// One reduction of one unit: every rank's gradient goes to the matrix's owner, which sums them.
//
// An exchange (all-to-all) and a sum in rank order on the owner instead of the backend's reduce:
// (N-1)P bytes in the whole job, where gloo's reduce takes 1.25 times that on 4 ranks; the sum is
// in float32 whatever dtype travels; and its order is fixed, so the bits depend neither on packing
// nor on who owns what.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "engine/transport.h"
#include "engine/unit_store.h"

namespace dmuon {

class Reduction {
 public:
  // `gradients`: one per slot of the unit, undefined where this rank has none (it sends zeros). The
  // sum is divided by `divisor`.
  Reduction(const UnitStore& unit, std::vector<at::Tensor> gradients, at::ScalarType dtype,
            double divisor);

  // Collective: packs and issues. Lets the gradients go.
  void start(Transport& transport);
  // Waits and sums. From any thread, once.
  void finish();

  // After `finish`, of an owned slot: the mean in float32, in the parameter's sizes; undefined
  // where no rank had a gradient.
  at::Tensor result(int slot) const;

  int64_t nbytes() const { return nbytes_; }  // what the sum reads; after `start`
  bool on_host() const { return options_.device().is_cpu(); }

 private:
  // Segments that move together, at most one per owner.
  struct Transfer {
    std::vector<int> segments;
    int mine = -1;        // the one that this rank owns, if any
    at::Tensor packed;    // what goes to the others, in rank order, then what stays here
    at::Tensor received;  // the others' pieces of `mine`, in rank order
    at::Tensor sum;       // of `mine`
    std::unique_ptr<Pending> pending;
  };

  static std::vector<Transfer> transfers_of(const UnitStore& unit);
  void start(Transfer& transfer, Transport& transport);
  void pack(const SegmentStore& segment, const at::Tensor& packed, int64_t offset) const;
  void sum(Transfer& transfer) const;

  const UnitStore& unit_;
  std::vector<at::Tensor> gradients_;
  at::TensorOptions options_;
  double divisor_;
  int rank_ = 0, size_ = 1;
  int64_t nbytes_ = 0;
  std::vector<Transfer> transfers_;
};

}  // namespace dmuon
