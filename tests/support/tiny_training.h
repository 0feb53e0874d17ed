// Scripts over tiny jobs: run on every rank of a mesh, compared with one process.
#pragma once
#include <functional>
#include <map>
#include <string>

#include "tests/support/tiny_job.h"

namespace dmuon::testing {

constexpr int kRows = 24;  // divisible by 2, 3, 4 and 8

using Weights = std::map<std::string, at::Tensor>;
// `cells` ranks, or groups of TP ranks, share each batch out; this is one of them.
using Script = std::function<void(TinyJob&, int cell, int cells)>;

// Runs the script on every rank; returns the owners' weights, their shards put together. Expects
// what is whole on several TP ranks to have the same bits there. `seed`: of random delays.
Weights trained(SimWorld& world, const TinyOptions& options, const Script& script);
Weights trained(int ranks, const TinyOptions& options, const Script& script, uint64_t seed = 0);

bool same_bits(const Weights& a, const Weights& b);
void expect_equal_to_one_process(const Weights& got, const ReferenceScript& script,
                                 int64_t inner = kInner);

// The usual loop, on a job and on the reference.
void plain_steps(TinyJob& job, int cell, int cells, int steps);
ReferenceScript reference_steps(int steps);

// Every way in which a matrix may be cut over `tps` ranks; the second has cut what the first has
// not, and along the other dims.
Cuts some_cuts(int tps, int64_t inner = kInner);
Cuts other_cuts(int tps, int64_t inner = kInner);

}  // namespace dmuon::testing
