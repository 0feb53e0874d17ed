// Orthogonalises matrices: moves every singular value close to 1, without an SVD.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <vector>

namespace dmuon {

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
// polynomial, where that costs no more FLOPs: below an aspect ratio of about 1.5 in float32, 5.7 in
// bfloat16 (for five steps and one restart). newton_schulz_kernel names what runs.
enum class NsAlgorithm { gram, direct };

// automatic: float32, and float16 on a GPU for which kernels/cuda was loaded (docs/cuda.md).
// bfloat16 is the precision of X and of the products with it; gram keeps its short x short matrices
// in float32, where a bfloat16 chain diverges.
enum class NsDtype { automatic, float32, bfloat16 };

struct NewtonSchulz {
  NsAlgorithm algorithm = NsAlgorithm::gram;
  CoefficientSet coefficients = polar_express_coefficients();
  int steps = 5;
  // gram: steps before which X is applied and the Gram matrix rebuilt. One more comes by itself
  // after five steps without: rounding grows with every step of a chain, and a long one diverges.
  std::vector<int> restarts = {2};
  NsDtype dtype = NsDtype::automatic;

  // Throws ConfigError: steps < 1, no coefficients, gram with a restart outside [1, steps).
  void validate() const;
};

// x: [m, n] or [b, m, n], floating point, any strides, not modified. Returns the same shape in
// float32, contiguous. Rows > cols is transposed inside. Empty in, empty out. Not differentiable.
// Each matrix of a batch is divided by its own max|x| and then by its Frobenius norm, in fp32 with
// the squares summed so that nothing over- or underflows (in float64 on the CPU): only an exact
// zero gives zero. A NaN or an infinity makes its whole matrix NaN, and no other. Throws
// ConfigError for other dims or dtypes.
at::Tensor newton_schulz(const at::Tensor& x, const NewtonSchulz& options);

// The plain reference: the direct iteration, one matrix after the other, in x's own dtype, which is
// also that of the result: float64 where x is float64. Slow; the tests' oracle.
at::Tensor newton_schulz_reference(const at::Tensor& x, const NewtonSchulz& options);

// What runs for this shape on this machine, e.g. "gram/mm/float32".
std::string newton_schulz_kernel(int64_t batch, int64_t rows, int64_t cols,
                                 const NewtonSchulz& options);

}  // namespace dmuon
