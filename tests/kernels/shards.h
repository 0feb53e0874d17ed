// Sharded Newton-Schulz of matrices that are cut here, with all ranks and the owner in one thread.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "kernels/sharded_gram.h"

namespace dmuon {

using Lengths = std::vector<int64_t>;

// -2 or -1.
int64_t cut_dim(CutDim cut);

// The dim to cut so that the Gram matrix is the small one, and the other.
CutDim longer(const at::Tensor& x);
CutDim shorter(const at::Tensor& x);

// The cut dim of x for so many ranks: uneven, and where there are three or more, one of them empty.
Lengths uneven(const at::Tensor& x, CutDim cut, int64_t ranks);

// One result per piece.
std::vector<at::Tensor> orthogonalised(const std::vector<at::Tensor>& pieces, CutDim cut,
                                       const NewtonSchulz& options);

// The same of x cut into these lengths, put together again.
at::Tensor sharded(const at::Tensor& x, CutDim cut, const Lengths& lengths,
                   const NewtonSchulz& options = {});

}  // namespace dmuon
