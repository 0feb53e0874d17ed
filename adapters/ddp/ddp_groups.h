// The process groups of DDP's channels: one of its own for each, so that the order of the calls in
// a group is the order of one thread.
#pragma once
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <string>

#include "engine/lane.h"
#include "engine/transport.h"

namespace dmuon {

// A new process group of all ranks of the job, which nobody else uses, for `purpose`: "control",
// whose tensors are on the CPU, or "replicate_reduce", "publish" or "replicas", on the model's
// device. Every rank is asked for the same ones in the same order.
using MakeGroup = std::function<c10::intrusive_ptr<c10d::ProcessGroup>(const std::string& purpose)>;

// Splits `group` for every purpose. Its backend must be able to, and have CPU tensors for
// "control"; otherwise asking throws ConfigError.
MakeGroup split_of(c10::intrusive_ptr<c10d::ProcessGroup> group);

std::unique_ptr<Transport> make_transport(const MakeGroup& make_group, FlightRing* ring,
                                          Channel channel, const std::string& purpose);

// On the host a strand, on an accelerator a stream.
std::unique_ptr<Lane> make_lane(const std::string& name, const c10::Device& device);

}  // namespace dmuon
