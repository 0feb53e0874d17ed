#include "adapters/ddp/ddp_groups.h"

#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "engine/error.h"

namespace dmuon {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

MakeGroup split_of(Group group) {
  return [group = std::move(group)](const std::string& purpose) -> Group {
    if (!group) throw ConfigError("the process group is null. Give one that all ranks share.");
    std::vector<int> ranks(group->getSize());
    std::iota(ranks.begin(), ranks.end(), 0);
    try {
      return group->splitGroup(ranks, std::nullopt, std::nullopt, "dmuon_" + purpose, std::nullopt);
    } catch (const c10::Error& error) {
      throw ConfigError(message("the process group cannot be split for '", purpose,
                                "': ", error.what_without_backtrace(),
                                ". Give a function that makes a group for each purpose instead."));
    }
  };
}

std::unique_ptr<Transport> make_transport(const MakeGroup& make_group, FlightRing* ring,
                                          Channel channel, const std::string& purpose) {
  Group group = make_group(purpose);
  if (!group) {
    throw ConfigError(message("there is no process group for '", purpose,
                              "': the function that makes them returned null."));
  }
  return make_c10d_transport(std::move(group), ring, channel);
}

std::unique_ptr<Lane> make_lane(const std::string& name, const c10::Device& device) {
  return device.is_cpu() ? make_host_lane(name) : make_device_lane(name, device);
}

}  // namespace dmuon
