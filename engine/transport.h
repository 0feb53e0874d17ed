// The collectives the engine needs, over one process group. The seam under which tests run many
// ranks as threads, delay, reorder and fail operations.
//
// Collective: every rank of the group makes the same calls in the same order, each from one thread
// at a time. On the host a call returns when its tensors may be used; on an accelerator it enqueues
// on the current stream. Ranks are group ranks. Tensors are dense, contiguous, on one device.
// A failure throws RuntimeFailure; after it the transport is closed: every later call throws it
// too.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace dmuon {

class FlightRing;
enum class Channel : uint8_t;

struct Broadcast {
  at::Tensor tensor;  // read on the root, overwritten elsewhere
  int root = 0;
};

enum class ReduceOp { sum, max };

// An operation that has been issued. Its tensors are held until it is destroyed.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual void wait() = 0;  // until they may be used; as the Transport's calls do
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // All of them together. `unit` names the operation in the flight ring.
  virtual void broadcast(const std::vector<Broadcast>& parts, const std::string& unit) = 0;

  // The same, issued now and finished by wait(). What cannot run beside its caller is finished when
  // this returns.
  virtual std::unique_ptr<Pending> start_broadcast(const std::vector<Broadcast>& parts,
                                                   const std::string& unit);

  // Sends send_counts[r] elements of `send` to rank r and receives recv_counts[r] from it; both in
  // rank order. A rank's own counts are 0: it keeps what is its own.
  virtual void exchange(at::Tensor recv, const std::vector<int64_t>& recv_counts, at::Tensor send,
                        const std::vector<int64_t>& send_counts, const std::string& unit) = 0;

  // The same, issued now and finished by wait(), from any thread. What cannot run beside its caller
  // is finished when this returns.
  virtual std::unique_ptr<Pending> start_exchange(at::Tensor recv,
                                                  const std::vector<int64_t>& recv_counts,
                                                  at::Tensor send,
                                                  const std::vector<int64_t>& send_counts,
                                                  const std::string& unit);

  virtual void all_reduce(at::Tensor tensor, ReduceOp op, const std::string& unit) = 0;

  // `out` has size() rows of the shape of `in`. in.numel() >= 1 (gloo cannot gather nothing).
  virtual void all_gather(at::Tensor out, at::Tensor in, const std::string& unit) = 0;

  // Closes the transport and frees the ranks that wait in a collective of this group, where the
  // backend can. gloo cannot: there its peers are freed when this process ends the group
  // (destroy_process_group; the transport no longer holds it), or by their timeout. Any thread.
  virtual void abort(const std::string& reason) = 0;
};

// An axis of one rank: nothing is communicated, no group is needed.
std::unique_ptr<Transport> make_local_transport();

// Over c10d: gloo, NCCL, or whatever the group has. `ring` may be null and outlives the transport.
// With size 1 nothing is communicated. `channel`: what the ring is to call its operations.
std::unique_ptr<Transport> make_c10d_transport(const std::string& group_name, FlightRing* ring,
                                               Channel channel);
std::unique_ptr<Transport> make_c10d_transport(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                               FlightRing* ring, Channel channel);
// Channel::control
std::unique_ptr<Transport> make_c10d_transport(const std::string& group_name, FlightRing* ring);
std::unique_ptr<Transport> make_c10d_transport(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                               FlightRing* ring);

}  // namespace dmuon
