// Lists of matrices on the CPU: who computes which, with how many threads.
#pragma once
#include <string>
#include <vector>

#include "kernels/cpu/workspace.h"
#include "kernels/newton_schulz.h"

namespace dmuon::cpu {

// newton_schulz of kernels/newton_schulz.h, for jobs that have been checked and are not empty.
void newton_schulz_list(const std::vector<NsJob>& jobs, const NewtonSchulz& options,
                        NsWorkspace& workspace);

std::string newton_schulz_name(int64_t batch, int64_t rows, int64_t cols,
                               const NewtonSchulz& options);

// costs: falling. How many of the first to share among all threads, one after the other, before the
// others run side by side, so that all is done soonest. A shared matrix is counted as taking
// 1 / (0.9 threads) of its time.
int64_t shared_first(const std::vector<double>& costs, int threads);

}  // namespace dmuon::cpu
