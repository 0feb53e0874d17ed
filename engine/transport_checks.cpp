#include "engine/transport_checks.h"

#include <numeric>

#include "engine/error.h"

namespace dmuon {
namespace {

void require_counts(const char* what, const at::Tensor& tensor, const std::vector<int64_t>& counts,
                    int rank, int size, const std::string& unit) {
  require_dense(tensor, unit);
  if (static_cast<int>(counts.size()) != size) {
    throw ConfigError(message("exchange '", unit, "': ", what, "_counts has ", counts.size(),
                              " entries; one for each of the ", size, " ranks is wanted"));
  }
  if (counts[rank] != 0) {
    throw ConfigError(message("exchange '", unit, "': ", what, "_counts[", rank, "] is ",
                              counts[rank], " on rank ", rank,
                              "; a rank keeps its own part, "
                              "so 0 is wanted"));
  }
  if (sum(counts) != tensor.numel()) {
    throw ConfigError(message("exchange '", unit, "': ", what, " has ", tensor.numel(),
                              " elements; ", what, "_counts add up to ", sum(counts)));
  }
}

void require_one_type(const at::Tensor& a, const at::Tensor& b, const std::string& what) {
  if (a.scalar_type() == b.scalar_type()) return;
  throw ConfigError(message(what, ": tensors of ", a.scalar_type(), " and ", b.scalar_type(),
                            " were given; one type is wanted"));
}

}  // namespace

void require_dense(const at::Tensor& tensor, const std::string& unit) {
  if (!tensor.defined()) throw ConfigError(message("'", unit, "': an undefined tensor was given"));
  if (tensor.layout() == at::kStrided && tensor.is_contiguous()) return;
  const std::string strides =
      tensor.layout() == at::kStrided ? message(", strides ", tensor.strides()) : "";
  throw ConfigError(message("'", unit, "': a tensor of shape ", tensor.sizes(), strides,
                            " was given; a dense, contiguous one is wanted"));
}

void require_root(int root, int size, const std::string& unit) {
  if (root >= 0 && root < size) return;
  throw ConfigError(message("broadcast '", unit, "': root is ", root, "; a group rank below ", size,
                            " is wanted"));
}

void require_exchange(const at::Tensor& recv, const std::vector<int64_t>& recv_counts,
                      const at::Tensor& send, const std::vector<int64_t>& send_counts, int rank,
                      int size, const std::string& unit) {
  require_counts("recv", recv, recv_counts, rank, size, unit);
  require_counts("send", send, send_counts, rank, size, unit);
  require_one_type(recv, send, "exchange '" + unit + "'");
}

void require_gather(const at::Tensor& out, const at::Tensor& in, int size,
                    const std::string& unit) {
  require_dense(out, unit);
  require_dense(in, unit);
  require_one_type(out, in, "all_gather '" + unit + "'");
  if (in.numel() >= 1 && out.numel() == size * in.numel()) return;
  throw ConfigError(message("all_gather '", unit, "': out has ", out.numel(), " elements and in ",
                            in.numel(), "; in needs at least 1, and out ", size, " times as many"));
}

int64_t sum(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

}  // namespace dmuon
