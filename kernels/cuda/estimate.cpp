#include <algorithm>

#include "kernels/cuda/plan.h"

namespace dmuon::cuda {
namespace {

constexpr int64_t kTile = 128;
constexpr double kBytesPerNs = 3500;
constexpr double kLaunchNs = 2000;

// One tile, one step of k: 2 * 128 * 128 operations of one multiprocessor.
double tile_ns(Element element) { return element == Element::float32 ? 75 : 6.7; }

int64_t tiles(int64_t length) { return (length + kTile - 1) / kTile; }

class Estimate {
 public:
  Estimate(const Plan& plan, const Machine& machine) : plan_(plan), machine_(machine) {}

  double operator()(const Product& p) const {
    const int64_t count = p.list < 0 ? plan_.problem.batch : plan_.lists[p.list].size();
    const int64_t work = count * tiles(p.m) * tiles(p.n);
    const int64_t waves = (work + machine_.multiprocessors - 1) / machine_.multiprocessors;
    return kLaunchNs + static_cast<double>(waves * p.k) * tile_ns(plan_[p.a].element);
  }

  double operator()(const Finish& f) const {
    const double copies = (f.mirror ? 1 : 0) + (f.also == f.of ? 0 : 2);
    return pass(copies * bytes(plan_[f.of]));
  }

  double operator()(const Import& i) const { return pass(bytes(plan_[i.to])); }
  double operator()(const Convert& c) const {
    return pass(bytes(plan_[c.from]) + bytes(plan_[c.to]));
  }
  double operator()(const Export& e) const {
    return pass(bytes(plan_[e.from]) + bytes(plan_[Name::output]));
  }

 private:
  double bytes(const Matrix& matrix) const {
    return static_cast<double>(plan_.problem.batch * matrix.elements() * bytes_of(matrix.element));
  }
  double pass(double bytes) const { return kLaunchNs + bytes / kBytesPerNs; }

  const Plan& plan_;
  const Machine& machine_;
};

}  // namespace

double estimated_ns(const Plan& plan, const Machine& machine) {
  double sum = 0;
  for (const Step& step : plan.steps) sum += std::visit(Estimate(plan, machine), step);
  return sum;
}

}  // namespace dmuon::cuda
