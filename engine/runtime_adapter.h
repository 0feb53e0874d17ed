// What the engine asks of a runtime (FSDP2, DDP, ZeRO). The life of a unit is written once, in the
// engine; a runtime answers these questions and decides nothing else.
#pragma once
#include <c10/core/ScalarType.h>

namespace dmuon {

// Where whole weights live between uses.
enum class Residency {
  transient,               // on the owner only; materialised for forward and again for backward
  resident_after_forward,  // kept from forward to backward
  resident,                // on every rank, always: the shard axis has one rank
};

// What a unit computes with, and what its gradients travel as.
struct UnitDtypes {
  c10::ScalarType compute_dtype = c10::ScalarType::Float;
  c10::ScalarType reduce_dtype = c10::ScalarType::Float;
};

// `unit` indexes OwnershipPlan::units. Called on the training thread.
class RuntimeAdapter {
 public:
  virtual ~RuntimeAdapter() = default;

  // A backward pass begins: `synchronize` is about to be asked about its units.
  virtual void begin_pass() {}

  // Whether the weights of the next unit may be fetched while one computes, at the price of one
  // more whole unit in memory.
  virtual bool prefetches() const { return false; }

  virtual Residency residency(int unit) const = 0;

  // Whether this backward pass ends an accumulation: gradients are reduced, not kept.
  virtual bool synchronize(int unit) const = 0;

  // The sum of the ranks' gradients is divided by this.
  virtual double divisor(int unit) const = 0;

  // The dtype a forward computes with, and the dtype in which gradients travel. They are summed in
  // float32 whatever travels. Constant from the first forward on.
  virtual c10::ScalarType compute_dtype(int unit) const = 0;
  virtual c10::ScalarType reduce_dtype(int unit) const = 0;
};

}  // namespace dmuon
