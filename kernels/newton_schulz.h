// Orthogonalises matrices: moves every singular value close to 1, without an SVD.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

namespace dmuon {

class NsWorkspace;  // kernels/cpu/workspace.h

// One step maps X to a X + (b A + c A A) X with A = X X^T.
using CoefficientRow = std::array<double, 3>;

enum class PastEnd { repeat_last, cycle };  // what step k uses beyond the last row

struct CoefficientSet {
  std::string name;
  std::vector<CoefficientRow> rows;
  PastEnd past_end = PastEnd::repeat_last;

  const CoefficientRow& row(int step) const;
};

const CoefficientSet& polar_express_coefficients();  // the default, safety factor 1.05 applied
const CoefficientSet& you_coefficients();
const CoefficientSet& jordan_coefficients();

// gram iterates on X X^T and visits X once per restart; it falls back to direct, the same
// polynomial, where that takes no longer: near squares. newton_schulz_kernel names what runs.
enum class NsAlgorithm { gram, direct };

// automatic: float32, and float16 on a GPU for which kernels/cuda was loaded (docs/cuda.md).
// bfloat16 allows X and the products with it to be rounded to bfloat16, where that is faster on
// this machine; gram keeps its short x short matrices in float32, where a bfloat16 chain diverges.
enum class NsDtype { automatic, float32, bfloat16 };

struct NewtonSchulz {
  NsAlgorithm algorithm = NsAlgorithm::gram;
  CoefficientSet coefficients = polar_express_coefficients();
  int steps = 5;
  // gram: steps before which X is applied and the Gram matrix rebuilt. A restart costs two passes
  // over X and makes the result more accurate. One more comes by itself after five steps without:
  // rounding grows with every step of a chain, and a long one diverges. nullopt leaves them to the
  // kernel, which makes one before the third step, but none in float32 on the CPU where the short
  // dim is 128 or more and the long one 2.5 times that: relative error 1e-5 on random matrices, up
  // to 3e-3 on ill-conditioned ones; with that restart up to 3e-4, with {1, 3} up to 2e-4, at most
  // 2.5 times that of torch's direct iteration. For five steps of Polar Express;
  // docs/newton_schulz.md has the table.
  std::optional<std::vector<int>> restarts;
  NsDtype dtype = NsDtype::automatic;

  // Throws ConfigError: steps or rows of coefficients outside [1, 1000], gram with a restart
  // outside [1, steps), and coefficients that make singular values negative or larger than 1.5, or
  // pass 1000 on the way: those up to 1.005 of the Frobenius norm, half a percent being what 16-bit
  // rounding may add.
  void validate() const;
};

// x: [m, n] or [b, m, n] of float64, float32, bfloat16 or float16, any strides, not modified.
// Returns the same shape in float32, contiguous. Rows > cols is transposed inside. Empty in, empty
// out. Not differentiable. Each matrix of a batch is divided by its own max|x| and then by its
// Frobenius norm, in fp32 with the squares summed so that nothing over- or underflows (in float64
// on the CPU): only an exact zero gives zero. A NaN or an infinity makes its whole matrix NaN, and
// no other. Throws ConfigError for other dims or dtypes, and for tensors without plain memory of
// their own (kernels/checks.h).
at::Tensor newton_schulz(const at::Tensor& x, const NewtonSchulz& options);

// One of a list: out = newton_schulz(in), of in's sizes, contiguous, float32, bfloat16 or float16,
// on in's device. It may be `in` itself, if that is contiguous.
struct NsJob {
  at::Tensor in;
  at::Tensor out;
};

// All of an owner's matrices in one call: with several threads (at::get_num_threads) one matrix
// after the other, shared by all, or several side by side, whichever ends first. The bits of a
// matrix depend neither on the threads nor on its neighbours. On the CPU no memory for
// matrices is allocated while shapes stay what they were, but for float64, for strides without a 1
// and for norms beyond 2^100. All jobs are checked before any runs.
void newton_schulz(const std::vector<NsJob>& jobs, const NewtonSchulz& options,
                   NsWorkspace& workspace);

// The plain reference: the direct iteration, one matrix after the other, in x's own dtype, which is
// also that of the result: float64 where x is float64. Slow; the tests' oracle.
at::Tensor newton_schulz_reference(const at::Tensor& x, const NewtonSchulz& options);

// What runs for this shape on this machine, e.g. "gram/avx512/float32"; "gram/mm/float32" where the
// machine's own kernels have failed their check on first use (kernels/cpu/self_check.h).
std::string newton_schulz_kernel(int64_t batch, int64_t rows, int64_t cols,
                                 const NewtonSchulz& options);

}  // namespace dmuon
