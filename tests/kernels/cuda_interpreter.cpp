#include "tests/kernels/cuda_interpreter.h"

#include <ATen/ops/empty_like.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cuda/matmul_call.h"

namespace dmuon {
namespace {

using cuda::BlockList;
using cuda::BlockOffsets;
using cuda::Convert;
using cuda::Element;
using cuda::Export;
using cuda::Finish;
using cuda::Import;
using cuda::MatmulCall;
using cuda::Matrix;
using cuda::Name;
using cuda::Plan;
using cuda::Product;

float load(Element element, const char* base, int64_t index) {
  const char* at = base + index * cuda::bytes_of(element);
  if (element == Element::float32) return *reinterpret_cast<const float*>(at);
  if (element == Element::float16) return *reinterpret_cast<const c10::Half*>(at);
  return *reinterpret_cast<const c10::BFloat16*>(at);
}

void store(Element element, char* base, int64_t index, float value) {
  char* at = base + index * cuda::bytes_of(element);
  if (element == Element::float32) {
    *reinterpret_cast<float*>(at) = value;
  } else if (element == Element::float16) {
    *reinterpret_cast<c10::Half*>(at) = value;
  } else {
    *reinterpret_cast<c10::BFloat16*>(at) = value;
  }
}

class Interpreter {
 public:
  Interpreter(const Plan& plan, const float* in, float* out)
      : plan_(plan),
        workspace_(static_cast<size_t>(plan.workspace_bytes), '\xff'),
        in_(in),
        out_(reinterpret_cast<char*>(out)) {
    for (const BlockList& list : plan.lists) fill_pointers(list);
  }

  void operator()(const Import& step) {
    const Matrix& have = plan_[Name::input];
    for (int64_t b = 0; b < plan_.problem.batch; ++b) {
      const double factor = factor_of(in_ + b * have.elements(), have.elements()) * step.scale;
      copy(step.to, b, have,
           [&](int64_t i) { return static_cast<float>(in_[b * have.elements() + i] * factor); });
    }
  }

  void operator()(const Product& step) {
    const MatmulCall call = column_major(plan_, step);
    for (int64_t i = 0; i < call.count; ++i) {
      const Operands at =
          call.pointers ? pointers(plan_.lists[step.list], i) : strided(call, step, i);
      multiply(call, static_cast<float>(step.alpha), static_cast<float>(step.beta), at);
    }
  }

  void operator()(const Finish& step) {
    const Matrix& matrix = plan_[step.of];
    const int64_t n = matrix.rows;
    for (int64_t i = 0; i < plan_.problem.batch * n * n; ++i) {
      const int64_t first = i / (n * n) * n * n, row = i % (n * n) / n, col = i % n;
      const bool mirrored = step.mirror && row < col;
      const float value = load(matrix.element, base(step.of), mirrored ? first + col * n + row : i);
      store(matrix.element, base(step.of), i, value);
      if (step.also == step.of) continue;
      const auto diagonal = static_cast<float>(row == col ? step.diagonal : 0);
      store(matrix.element, base(step.also), i, value + diagonal);
    }
  }

  void operator()(const Convert& step) { scale_into(step.to, step.from, 1); }
  void operator()(const Export& step) { scale_into(Name::output, step.from, step.scale); }

 private:
  struct Operands {
    const char *a, *b, *c;  // of the column-major call
    char* d;
  };

  char* base(Name name) {
    return name == Name::output ? out_ : workspace_.data() + plan_[name].offset;
  }

  static double factor_of(const float* x, int64_t size) {
    double squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += static_cast<double>(x[i]) * x[i];
    if (!std::isfinite(squares)) return std::numeric_limits<double>::quiet_NaN();
    return squares == 0 ? 1 : 1 / std::sqrt(squares);
  }

  template <class Value>
  void copy(Name to, int64_t b, const Matrix& have, Value value) {
    const Matrix& want = plan_[to];
    for (int64_t row = 0; row < want.rows; ++row) {
      for (int64_t col = 0; col < want.cols; ++col) {
        const bool inside = row < have.rows && col < have.cols;
        store(want.element, base(to), b * want.elements() + row * want.cols + col,
              inside ? value(row * have.cols + col) : 0.0F);
      }
    }
  }

  void scale_into(Name to, Name from, double scale) {
    const Matrix& have = plan_[from];
    for (int64_t b = 0; b < plan_.problem.batch; ++b) {
      copy(to, b, have, [&](int64_t i) {
        return load(have.element, base(from), b * have.elements() + i) * static_cast<float>(scale);
      });
    }
  }

  void fill_pointers(const BlockList& list) {
    auto* pointers = reinterpret_cast<char**>(workspace_.data() + list.pointers);
    for (int64_t i = 0; i < list.size(); ++i) {
      const BlockOffsets at = block_offsets(list, i);
      const int64_t offsets[] = {at.a, at.b, at.c, at.d};
      for (int k = 0; k < 4; ++k) {
        pointers[k * list.size() + i] = workspace_.data() + offsets[k];
      }
    }
  }

  Operands pointers(const BlockList& list, int64_t i) {
    auto* all = reinterpret_cast<char**>(workspace_.data() + list.pointers);
    const int64_t size = list.size();
    return {all[size + i], all[i], all[2 * size + i], all[3 * size + i]};
  }

  Operands strided(const MatmulCall& call, const Product& step, int64_t i) {
    const int64_t factor = cuda::bytes_of(call.factors), result = cuda::bytes_of(call.result);
    return {base(step.b) + i * call.stride_a * factor, base(step.a) + i * call.stride_b * factor,
            base(step.c) + i * call.stride_d * result, base(step.d) + i * call.stride_d * result};
  }

  // [n][k] of op(X), from a column-major matrix
  static std::vector<float> decoded(Element element, const char* base, bool by_rows, int64_t n,
                                    int64_t k, int64_t ld) {
    std::vector<float> values(static_cast<size_t>(n * k));
    for (int64_t i = 0; i < n * k; ++i) {
      const int64_t outer = i / k, inner = i % k;
      values[static_cast<size_t>(i)] =
          load(element, base, by_rows ? outer + inner * ld : inner + outer * ld);
    }
    return values;
  }

  static void multiply(const MatmulCall& call, float alpha, float beta, const Operands& at) {
    const bool a_by_k = !call.transpose_a;
    const std::vector<float> a = decoded(call.factors, at.a, !a_by_k, call.k, call.m, call.lda);
    const std::vector<float> b =
        decoded(call.factors, at.b, call.transpose_b, call.n, call.k, call.ldb);
    std::vector<float> sums(static_cast<size_t>(call.m));
    for (int64_t col = 0; col < call.n; ++col) {
      std::fill(sums.begin(), sums.end(), 0.0F);
      for (int64_t k = 0; k < call.k; ++k) add_scaled(sums, &a[k * call.m], b[col * call.k + k]);
      for (int64_t row = 0; row < call.m; ++row) {
        const int64_t d = row + col * call.ldd;
        const float added = beta == 0 ? 0 : beta * load(call.result, at.c, d);
        store(call.result, at.d, d, alpha * sums[row] + added);
      }
    }
  }

  static void add_scaled(std::vector<float>& sums, const float* values, float factor) {
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += values[i] * factor;
  }

  const Plan& plan_;
  std::vector<char> workspace_;
  const float* in_;
  char* out_;
};

}  // namespace

at::Tensor interpret(const Plan& plan, const at::Tensor& x) {
  at::Tensor out = at::empty_like(x);
  Interpreter interpreter(plan, x.const_data_ptr<float>(), out.mutable_data_ptr<float>());
  for (const cuda::Step& step : plan.steps) std::visit(interpreter, step);
  return out;
}

}  // namespace dmuon
