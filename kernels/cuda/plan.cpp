#include "kernels/cuda/plan.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>
#include <utility>

namespace dmuon::cuda {
namespace {

constexpr int kLongestHalfChain = 3;  // a longer one in float16 diverges on steep spectra
constexpr int kLongestChain = 5;
constexpr int kLargestShift = 14;
constexpr int kSquareShift = 12;
constexpr int64_t kRowElements = 8;
constexpr int64_t kOffsetBytes = 256;
constexpr int64_t kChunkElements = 16384, kMostChunks = 512;

int64_t rounded_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int64_t order_of(const Problem& problem) { return std::min(problem.rows, problem.cols); }

int64_t padded_order(const Problem& problem, int blocks, int64_t block_multiple) {
  const int64_t order = order_of(problem);
  if (blocks == 1) return rounded_up(order, kRowElements);
  return rounded_up((order + blocks - 1) / blocks, block_multiple) * blocks;
}

int x_shift_of(const Problem& problem) {
  if (problem.x != Element::float16) return 0;
  const double elements = static_cast<double>(problem.rows) * static_cast<double>(problem.cols);
  return std::clamp(static_cast<int>(std::lround(std::log2(elements) / 2)) - 2, 0, kLargestShift);
}

class Builder {
 public:
  Builder(const Problem& problem, const Machine& machine, bool gram, int blocks)
      : library_bytes_(machine.library_bytes) {
    plan_.problem = problem;
    plan_.gram = gram;
    plan_.blocks = blocks;
    plan_.x_shift = x_shift_of(problem);
    plan_.r_shift = problem.x == Element::float16 ? kSquareShift : 0;
    square_ = gram && problem.x == Element::bfloat16 ? Element::float32 : problem.x;
    by_rows_ = problem.rows <= problem.cols;
    order_ = padded_order(problem, blocks, machine.block_multiple);
    plan_[Name::input] = {problem.input, problem.rows, problem.cols};
    plan_[Name::output] = {Element::float32, problem.rows, problem.cols};
  }

  Plan build() {
    allocate_sums();
    plan_.steps.push_back(Import{x(), std::ldexp(1, plan_.x_shift)});
    if (plan_.gram) {
      build_gram();
    } else {
      build_direct();
    }
    plan_.library = allocate(library_bytes_);
    return std::move(plan_);
  }

 private:
  bool whole() const { return plan_.blocks == 1; }
  int steps() const { return static_cast<int>(plan_.problem.coefficients.size()); }

  int64_t allocate(int64_t bytes) {
    const int64_t offset = plan_.workspace_bytes;
    plan_.workspace_bytes += rounded_up(bytes, kOffsetBytes);
    return offset;
  }

  void allocate_sums() {
    const int64_t elements = plan_.problem.rows * plan_.problem.cols;
    plan_.chunks =
        std::clamp<int64_t>((elements + kChunkElements - 1) / kChunkElements, 1, kMostChunks);
    plan_.partials = allocate(8 * plan_.problem.batch * plan_.chunks);
    plan_.factors = allocate(8 * plan_.problem.batch);
  }

  Name used(Name name, Element element, int64_t rows, int64_t cols) {
    Matrix& matrix = plan_[name];
    if (matrix.rows == 0) {
      const int64_t bytes = plan_.problem.batch * rows * cols * bytes_of(element);
      matrix = {element, rows, cols, allocate(bytes)};
    }
    return name;
  }

  Name wide(Name name) {
    const int64_t rows = by_rows_ ? order_ : rounded_up(plan_.problem.rows, kRowElements);
    const int64_t cols = by_rows_ ? rounded_up(plan_.problem.cols, kRowElements) : order_;
    return used(name, plan_.problem.x, rows, cols);
  }

  Name square(Name name) { return used(name, square_, order_, order_); }
  Name x() { return wide(x_); }
  int64_t summed() { return by_rows_ ? plan_[x()].cols : plan_[x()].rows; }

  void symmetric(Form form, Name a, Name b, Name c, Name d, double alpha, double beta, int64_t k) {
    Product product{form, a, b, c, d, alpha, beta, order_, order_, k};
    if (!whole()) {
      product.list = list_of(product);
      product.m = product.n = order_ / plan_.blocks;
    }
    plan_.steps.push_back(product);
  }

  // Of two symmetric matrices that commute. Rows of b are its columns once it has been mirrored.
  void symmetric(Name a, Name b, Name c, Name d, double alpha, double beta) {
    symmetric(whole() ? Form::nn : Form::nt, a, b, c, square(d), alpha, beta, order_);
  }

  void mirror(Name name) {
    if (!whole()) plan_.steps.push_back(Finish{name, name, 0, true});
  }

  int64_t panel_bytes(Name name, Form form) const {
    const Matrix& matrix = plan_[name];
    const int64_t block = order_ / plan_.blocks * bytes_of(matrix.element);
    return form == Form::tn ? block : block * matrix.cols;
  }

  int list_of(const Product& p) {
    const auto key = std::tuple(p.form, p.a, p.b, p.c, p.d);
    const auto known = std::find(list_keys_.begin(), list_keys_.end(), key);
    if (known != list_keys_.end()) return static_cast<int>(known - list_keys_.begin());
    list_keys_.push_back(key);
    plan_.lists.push_back(new_list(p));
    return static_cast<int>(plan_.lists.size()) - 1;
  }

  BlockList new_list(const Product& p) {
    const Matrix &a = plan_[p.a], &b = plan_[p.b], &d = plan_[p.d];
    const int64_t block = order_ / plan_.blocks * bytes_of(d.element);
    BlockList list{.a = a.offset,
                   .b = b.offset,
                   .c = plan_[p.c].offset,
                   .d = d.offset,
                   .a_stride = a.elements() * bytes_of(a.element),
                   .b_stride = b.elements() * bytes_of(b.element),
                   .d_stride = d.elements() * bytes_of(d.element),
                   .a_panel = panel_bytes(p.a, p.form),
                   .b_panel = panel_bytes(p.b, p.form),
                   .block_row = block * d.cols,
                   .block_col = block,
                   .blocks = plan_.blocks,
                   .batch = plan_.problem.batch};
    list.pointers = allocate(4 * 8 * list.size());
    return list;
  }

  void gram_matrix() {
    const Form form = by_rows_ ? Form::nt : Form::tn;
    const double alpha = std::ldexp(1, plan_.r_shift - 2 * plan_.x_shift);
    symmetric(form, x(), x(), square(Name::r), Name::r, alpha, 0, summed());
    mirror(Name::r);
  }

  // Z = b R + c R R
  void polynomial(const std::array<double, 3>& row) {
    const double down = std::ldexp(1, -plan_.r_shift);
    symmetric(Name::r, Name::r, Name::r, Name::z, row[2] * down * down, row[1] * down);
  }

  // X = [a X +] F X, or X F^T where the Gram matrix is taken over columns
  void apply(Name factor, double a) {
    const Name from = x();
    std::swap(x_, x_spare_);
    const Matrix& matrix = plan_[x()];
    apply_into(x(), from, factor, 1, a, matrix.rows, matrix.cols);
  }

  void apply_into(Name to, Name from, Name factor, double alpha, double a, int64_t m, int64_t n) {
    Product product{Form::nn, factor, from, a == 0 ? to : from, to, alpha, a, m, n, order_};
    if (!by_rows_) {
      product.form = Form::nt;
      std::swap(product.a, product.b);
    }
    plan_.steps.push_back(product);
  }

  void export_x() { plan_.steps.push_back(Export{x(), std::ldexp(1, -plan_.x_shift)}); }

  void build_direct() {
    for (const auto& row : plan_.problem.coefficients) {
      gram_matrix();
      polynomial(row);
      mirror(Name::z);
      apply(Name::z, row[0]);
    }
    export_x();
  }

  void build_gram() {
    const int longest = plan_.problem.x == Element::float16 ? kLongestHalfChain : kLongestChain;
    const std::vector<int> bounds = bounds_of_chains(plan_.problem.restarts, steps(), longest);
    for (size_t i = 0; i + 1 < bounds.size(); ++i) {
      gram_matrix();
      for (int step = bounds[i]; step < bounds[i + 1]; ++step) {
        chain_step(plan_.problem.coefficients[static_cast<size_t>(step)], step == bounds[i],
                   step + 1 == bounds[i + 1]);
      }
      finish_chain(i + 2 == bounds.size());
    }
  }

  void chain_step(const std::array<double, 3>& row, bool first, bool last) {
    polynomial(row);
    if (first) {
      plan_.steps.push_back(Finish{Name::z, square(q_), row[0], !whole()});
    } else {
      mirror(Name::z);
    }
    if (!last) advance_gram(row[0]);
    if (!first) extend_product(row[0]);
  }

  // R = (a I + Z) R (a I + Z), never with a added to the diagonal of Z
  void advance_gram(double a) {
    symmetric(Name::r, Name::z, Name::r, spare_, 1, a);
    mirror(spare_);
    symmetric(Name::z, spare_, spare_, Name::r, 1, a);
    mirror(Name::r);
  }

  // Q = (a I + Z) Q, whole: mirrored, it errs twice to eight times as much.
  void extend_product(double a) {
    plan_.steps.push_back(
        Product{Form::nn, Name::z, q_, q_, square(spare_), 1, a, order_, order_, order_});
    std::swap(q_, spare_);
  }

  // Straight into the output where its rows begin at 16 bytes.
  void finish_chain(bool last) {
    Name factor = q_;
    if (square_ != plan_.problem.x) {
      factor = used(Name::factor, plan_.problem.x, order_, order_);
      plan_.steps.push_back(Convert{q_, factor});
    }
    if (!last) return apply(factor, 0);
    const Matrix& out = plan_[Name::output];
    if (out.cols % 4 == 0) {
      return apply_into(Name::output, x(), factor, std::ldexp(1, -plan_.x_shift), 0, out.rows,
                        out.cols);
    }
    apply(factor, 0);
    export_x();
  }

  Plan plan_;
  int64_t library_bytes_;
  Element square_;
  bool by_rows_;
  int64_t order_;
  Name x_ = Name::x, x_spare_ = Name::x_spare, q_ = Name::q, spare_ = Name::spare;
  std::vector<std::tuple<Form, Name, Name, Name, Name>> list_keys_;
};

bool may_have_blocks(const Problem& problem, const Machine& machine, int blocks) {
  return machine.pointer_arrays && order_of(problem) >= blocks * machine.smallest_block;
}

}  // namespace

std::vector<int> bounds_of_chains(const std::vector<int>& restarts, int steps, int longest) {
  const std::set<int> wanted(restarts.begin(), restarts.end());
  std::vector<int> bounds = {0};
  for (int step = 1; step < steps; ++step) {
    if (wanted.contains(step) || step - bounds.back() == longest) bounds.push_back(step);
  }
  bounds.push_back(steps);
  return bounds;
}

Plan plan_with(const Problem& problem, const Machine& machine, bool gram, int blocks) {
  return Builder(problem, machine, gram, blocks).build();
}

Plan make_plan(const Problem& problem, const Machine& machine) {
  std::vector<Plan> plans;
  for (bool gram : {false, true}) {
    if (gram && !problem.gram) continue;
    for (int blocks : {1, 4, 5, 6, 7, 8}) {
      if (blocks == 1 || may_have_blocks(problem, machine, blocks)) {
        plans.push_back(plan_with(problem, machine, gram, blocks));
      }
    }
  }
  return *std::min_element(plans.begin(), plans.end(), [&](const Plan& left, const Plan& right) {
    return estimated_ns(left, machine) < estimated_ns(right, machine);
  });
}

}  // namespace dmuon::cuda
