// The matrices of known models, as the planner sees them.
#pragma once
#include <vector>

#include "engine/plan.h"

namespace dmuon::bench {

// Shapes as in `transformers` 5; embeddings and heads are left to AdamW. A matrix of n elements has
// 4n bytes of momentum on its owner, and 6n cut over `tp` ranks: master in float32, copy in
// bfloat16.
std::vector<Matrix> gpt2(int64_t tp);
std::vector<Matrix> llama3_8b(int64_t tp);
std::vector<Matrix> llama3_70b(int64_t tp);
// Experts are 3-D stacks there: one matrix of the plan with a batch of 128.
std::vector<Matrix> qwen3_30b_a3b(int64_t tp);
// DeepSeek-V3's shapes with experts as modules of their own, as DeepSeek's own code has them.
std::vector<Matrix> deepseek_v3(int64_t tp);

// 100,000 matrices: 128 layers with 259 experts each.
std::vector<Matrix> experts(int64_t tp);
// 100,000 different shapes: nothing to gain from equal costs.
std::vector<Matrix> random_shapes(int64_t tp);
// 100,002 matrices of 14,286 layers of Llama-3 8B.
std::vector<Matrix> deep_llama(int64_t tp);

}  // namespace dmuon::bench
