// A chain of steps on a Gram matrix in panels: see Chain in kernels/iterate.h for the mathematics.
#pragma once
#include "kernels/cpu/panels.h"
#include "kernels/newton_schulz.h"

namespace dmuon::cpu {

// Every matrix here is a polynomial in R, so every product is symmetric and half is computed. In
// small matrices Q's product is computed whole, which errs half as much there.
class GramChain {
 public:
  static constexpr int kMatrices = 4;
  static constexpr int64_t kWholeBelow = 128;

  // data: kMatrices times Panels::floats(kernels, order, order)
  GramChain(const TileKernels& kernels, float* data, int64_t order, int threads);

  // Steps [begin, end) from the R in gram(); their product Q is then in product(), and R is spent.
  void run(const CoefficientSet& coefficients, int begin, int end);

  const Panels& gram() const { return r_; }
  const Panels& product() const { return q_; }

 private:
  void step(const CoefficientRow& row, bool first, bool last);
  void advance_gram(double a);
  void start_product(double a);
  void extend_product(double a);
  void multiply(const Panels& out, const Panels& a, const Panels& b, double alpha, double beta,
                const Panels& c) const;

  const TileKernels& kernels_;
  int threads_;
  Panels r_, z_, q_, spare_;
};

}  // namespace dmuon::cpu
