#include "engine/summing_exchange.h"

#include <ATen/ops/empty.h>

#include <numeric>

#include "kernels/sum_pieces.h"

namespace dmuon {

SummingExchange::SummingExchange(
    Transport& transport, const std::vector<int64_t>& counts, const at::TensorOptions& options,
    const std::string& name,
    const std::function<void(int r, const at::Tensor& packed, int64_t offset)>& fill)
    : rank_(transport.rank()), size_(transport.size()), own_(counts[rank_]) {
  std::vector<int64_t> send_counts = counts, recv_counts(size_, own_);
  send_counts[rank_] = recv_counts[rank_] = 0;
  sent_ = std::accumulate(send_counts.begin(), send_counts.end(), int64_t{0});
  packed_ = at::empty({sent_ + own_}, options);
  received_ = at::empty({own_ * (size_ - 1)}, options);
  int64_t offset = 0;
  for (int r = 0; r < size_; ++r) {
    fill(r, packed_, r == rank_ ? sent_ : offset);
    offset += send_counts[r];
  }
  pending_ = transport.start_exchange(
      received_, recv_counts, own_ ? packed_.narrow(0, 0, sent_) : packed_, send_counts, name);
}

at::Tensor SummingExchange::finish(double scale) {
  pending_->wait();
  std::vector<at::Tensor> pieces;
  pieces.reserve(size_);
  for (int r = 0; r < size_; ++r) {
    const int64_t before = r < rank_ ? r : r - 1;
    pieces.push_back(r == rank_ ? packed_.narrow(0, sent_, own_)
                                : received_.narrow(0, before * own_, own_));
  }
  at::Tensor sum = at::empty({own_}, packed_.options().dtype(at::kFloat));
  if (own_ > 0) sum_pieces(sum, pieces, scale, false);
  pending_.reset();
  packed_ = received_ = at::Tensor();
  return sum;
}

}  // namespace dmuon
