// What every transport demands of its arguments: violations throw ConfigError before anything
// moves.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace dmuon {

// Backends read strided views wrongly without a word (gloo broadcasts a column as a row).
void require_dense(const at::Tensor& tensor, const std::string& unit);

void require_root(int root, int size, const std::string& unit);

void require_exchange(const at::Tensor& recv, const std::vector<int64_t>& recv_counts,
                      const at::Tensor& send, const std::vector<int64_t>& send_counts, int rank,
                      int size, const std::string& unit);

void require_gather(const at::Tensor& out, const at::Tensor& in, int size, const std::string& unit);

int64_t sum(const std::vector<int64_t>& counts);

}  // namespace dmuon
