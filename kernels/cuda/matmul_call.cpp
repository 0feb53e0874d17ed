#include "kernels/cuda/matmul_call.h"

#include <algorithm>

namespace dmuon::cuda {
namespace {

constexpr int64_t kAlignment = 256;

void align_to(int64_t& alignment, int64_t bytes) {
  while (bytes % alignment != 0) alignment /= 2;
}

void set_strides(MatmulCall& call, const Plan& plan, const Product& p) {
  call.count = plan.problem.batch;
  call.stride_a = plan[p.b].elements();
  call.stride_b = plan[p.a].elements();
  call.stride_d = plan[p.d].elements();
  for (Name name : {p.a, p.b, p.d}) {
    align_to(call.alignment, plan[name].elements() * bytes_of(plan[name].element));
  }
}

void set_pointers(MatmulCall& call, const BlockList& list) {
  call.count = list.size();
  call.pointers = true;
  for (int64_t bytes : {list.a_stride, list.b_stride, list.d_stride, list.a_panel, list.b_panel,
                        list.block_row, list.block_col}) {
    align_to(call.alignment, bytes);
  }
}

}  // namespace

MatmulCall column_major(const Plan& plan, const Product& p) {
  MatmulCall call{.factors = plan[p.a].element,
                  .result = plan[p.d].element,
                  .transpose_a = p.form == Form::nt,
                  .transpose_b = p.form == Form::tn,
                  .m = p.n,
                  .n = p.m,
                  .k = p.k,
                  .lda = plan[p.b].cols,
                  .ldb = plan[p.a].cols,
                  .ldd = plan[p.d].cols,
                  .alignment = kAlignment};
  if (p.list < 0) {
    set_strides(call, plan, p);
  } else {
    set_pointers(call, plan.lists[static_cast<size_t>(p.list)]);
  }
  return call;
}

}  // namespace dmuon::cuda
