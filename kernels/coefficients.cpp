#include <cmath>
#include <utility>

#include "kernels/newton_schulz.h"

namespace dmuon {
namespace {

// Divides a row by (s, s^3, s^5): singular values up to s times the bound stay in range.
CoefficientRow damped(const CoefficientRow& row, double s) {
  return {row[0] / s, row[1] / std::pow(s, 3), row[2] / std::pow(s, 5)};
}

}  // namespace

const CoefficientRow& CoefficientSet::row(int step) const {
  const auto index = static_cast<size_t>(step);
  if (index < rows.size()) return rows[index];
  return past_end == PastEnd::cycle ? rows[index % rows.size()] : rows.back();
}

// arXiv:2505.16932; the safety factor as in Dao-AILab/gram-newton-schulz.
const CoefficientSet& polar_express_coefficients() {
  static const CoefficientSet set = [] {
    std::vector<CoefficientRow> rows = {
        {8.28721201814563, -23.595886519098837, 17.300387312530933},
        {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
        {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
        {3.3184196573706015, -2.488488024314874, 0.51004894012372},
        {2.300652019954817, -1.6689039845747493, 0.4188073119525673}};
    for (CoefficientRow& row : rows) row = damped(row, 1.05);
    return CoefficientSet{"polar_express", std::move(rows), PastEnd::repeat_last};
  }();
  return set;
}

// Jiacheng You; published with the modded-nanogpt speed runs.
const CoefficientSet& you_coefficients() {
  static const CoefficientSet set{"you",
                                  {{4.0848, -6.8946, 2.9270},
                                   {3.9505, -6.3029, 2.6377},
                                   {3.7418, -5.5913, 2.3037},
                                   {2.8769, -3.1427, 1.2046},
                                   {2.8366, -3.0525, 1.2012}},
                                  PastEnd::cycle};
  return set;
}

// Keller Jordan, https://kellerjordan.github.io/posts/muon/.
const CoefficientSet& jordan_coefficients() {
  static const CoefficientSet set{"jordan", {{3.4445, -4.7750, 2.0315}}, PastEnd::cycle};
  return set;
}

}  // namespace dmuon
