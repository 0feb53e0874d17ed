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

enum class NsAlgorithm { gram, direct };
enum class NsDtype { automatic, float32, bfloat16 };  // automatic: float32 on CPU

struct NewtonSchulz {
  NsAlgorithm algorithm = NsAlgorithm::gram;
  CoefficientSet coefficients = polar_express_coefficients();
  int steps = 5;
  std::vector<int> restarts = {2};  // gram: steps before which X is applied and the Gram rebuilt
  NsDtype dtype = NsDtype::automatic;

  // Throws ConfigError: steps < 1, no coefficients, a restart outside [1, steps).
  void validate() const;
};

// x: [m, n] or [b, m, n], floating point, any strides, not modified. Returns the same shape in
// float32, contiguous. Scale-free: x / max|x|, then divided by its Frobenius norm, in fp32 with the
// squares summed so that nothing over- or underflows; only an exact zero gives zero. Empty in, empty
// out. Rows > cols is transposed inside. Each matrix of a batch is normalised by itself.
at::Tensor newton_schulz(const at::Tensor& x, const NewtonSchulz& options);

// The plain reference: the direct iteration, one matrix after the other, in x's own dtype and in
// float64 where x is float64. Slow; the tests' oracle.
at::Tensor newton_schulz_reference(const at::Tensor& x, const NewtonSchulz& options);

// What runs for this shape on this machine, e.g. "gram/mm/float32".
std::string newton_schulz_kernel(int64_t batch, int64_t rows, int64_t cols,
                                 const NewtonSchulz& options);

}  // namespace dmuon
