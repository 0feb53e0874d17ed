#include "kernels/cpu/orthogonalise.h"

#include <algorithm>

#include "kernels/cpu/gram_chain.h"
#include "kernels/cpu/operand.h"
#include "kernels/cpu/product.h"
#include "kernels/cpu/threads.h"

namespace dmuon::cpu {
namespace {

// Columns of X that a thread multiplies at once: its copy of them stays in the cache.
int64_t strip_lanes(const TileKernels& kernels) { return 4 * kernels.width; }

// Columns of X packed for one product X X^T: about 512 KiB, in whole blocks of the product's depth.
int64_t chunk_depth(int64_t rows, int64_t cols) {
  constexpr int64_t kFloats = 131072, kBlock = 256;
  return std::min(cols, std::max<int64_t>(1, kFloats / rows / kBlock) * kBlock);
}

int64_t strips_of(int64_t cols, int64_t lanes) { return (cols + lanes - 1) / lanes; }

int64_t strip_floats(const TileKernels& kernels, int64_t rows) {
  return Arena::rounded(round_up(rows, kernels.width) * strip_lanes(kernels));
}

class Gram {
 public:
  Gram(const TileKernels& kernels, const Recipe& recipe, const Team& team, int64_t rows,
       int64_t cols)
      : kernels_(kernels),
        recipe_(recipe),
        team_(team),
        rows_(rows),
        cols_(cols),
        chain_(kernels, shared().take(chain_floats()), rows, team.count),
        chunk_(shared().take(chunk_floats())) {}

  static Demand demand(const TileKernels& kernels, const Recipe& recipe, const View& in,
                       const View& out) {
    const int64_t square = Panels::floats(kernels, in.rows, in.rows);
    const int64_t depth = chunk_depth(in.rows, in.cols);
    const auto rounding = [&](int64_t rows, int64_t lanes) {
      return Operand::floats(kernels, recipe.bfloat16, rows, lanes);
    };
    const int64_t strip =
        2 * strip_floats(kernels, in.rows) + rounding(in.rows, strip_lanes(kernels));
    int64_t first = Arena::rounded(GramChain::kMatrices * square) +
                    Arena::rounded(Panels::floats(kernels, depth, in.rows)) +
                    std::max(rounding(depth, in.rows), rounding(in.rows, in.rows) + strip);
    if (needs_middle(recipe, out)) first += Arena::rounded(in.rows * in.cols);
    return {.first = first, .others = strip};
  }

  void run(View in, const View& out, float factor) {
    View middle = out;
    if (needs_middle(recipe_, out)) {
      middle.data = shared().take(rows_ * cols_);
      middle.dtype = at::kFloat;
    }
    const std::vector<int>& bounds = recipe_.bounds;
    for (size_t i = 0; i + 1 < bounds.size(); ++i) {
      const bool last = i + 2 == bounds.size();
      build_gram(in, factor);
      chain_.run(recipe_.coefficients, bounds[i], bounds[i + 1]);
      apply(in, factor, last ? out : middle);
      in = middle;
      factor = 1;
    }
  }

 private:
  // X between two chains lies in `out` where that holds float32.
  static bool needs_middle(const Recipe& recipe, const View& out) {
    return recipe.bounds.size() > 2 && out.dtype != at::kFloat;
  }
  int64_t chain_floats() const {
    return GramChain::kMatrices * Panels::floats(kernels_, rows_, rows_);
  }
  int64_t chunk_floats() const {
    return Panels::floats(kernels_, chunk_depth(rows_, cols_), rows_);
  }
  Arena& shared() const { return team_.arenas[team_.first]; }

  void build_gram(const View& in, float factor) {
    const int64_t step = chunk_depth(rows_, cols_);
    for (int64_t k = 0; k < cols_; k += step) {
      const Panels chunk(chunk_, kernels_, std::min(step, cols_ - k), rows_);
      for_each(team_.count, chunk.count(), [&](int64_t panel, int) {
        const int64_t lane = panel * chunk.width;
        pack(kernels_, in.transposed(), k, lane, factor, chunk.lanes_from(lane, chunk.width));
      });
      const int64_t mark = shared().taken();
      const Operand x(kernels_, recipe_.bfloat16, chunk, shared());
      x.round(team_.count);
      const Panels& gram = chain_.gram();
      multiply_symmetric(kernels_,
                         {.a = x.panels(),
                          .b = x.panels(),
                          .beta = k == 0 ? 0.0f : 1.0f,
                          .c = gram,
                          .out = gram,
                          .pairs = recipe_.bfloat16},
                         /*mirror=*/k + step >= cols_, team_.count);
      shared().give_back_to(mark);
    }
  }

  // out = Q X, strip by strip of X's columns: as X lies row by row, Q times a strip; as it lies
  // column by column, the strip's transpose times Q.
  void apply(const View& in, float factor, const View& out) {
    const int64_t lanes = strip_lanes(kernels_);
    const int64_t before = shared().taken();
    const Operand q(kernels_, recipe_.bfloat16, chain_.product(), shared());
    q.round(team_.count);
    for_each(team_.count, strips_of(cols_, lanes), [&](int64_t index, int thread) {
      Arena& arena = team_.arenas[team_.first + thread];
      const int64_t mark = arena.taken(), at = index * lanes, n = std::min(lanes, cols_ - at);
      const Panels strip(arena.take(strip_floats(kernels_, rows_)), kernels_, rows_, n);
      float* result = arena.take(strip_floats(kernels_, rows_));
      const Operand x(kernels_, recipe_.bfloat16, strip, arena);
      pack(kernels_, in, 0, at, factor, strip);
      x.round();
      if (out.wide()) {
        store({result, kernels_, rows_, n}, q.panels(), x.panels(), out, 0, at);
      } else {
        store({result, kernels_, n, rows_}, x.panels(), q.panels(), out.transposed(), at, 0);
      }
      arena.give_back_to(mark);
    });
    shared().give_back_to(before);
  }

  void store(const Panels& result, const Panels& a, const Panels& b, const View& out, int64_t row,
             int64_t col) const {
    multiply_rows(kernels_, {.a = a, .b = b, .c = result, .out = result, .pairs = recipe_.bfloat16},
                  0, result.padded_depth);
    unpack(kernels_, result, out, row, col);
  }

  const TileKernels& kernels_;
  const Recipe& recipe_;
  const Team& team_;
  int64_t rows_, cols_;
  GramChain chain_;
  float* chunk_;
};

// X lies in panels both ways: as it is multiplied, and transposed for X X^T.
class Direct {
 public:
  Direct(const TileKernels& kernels, const Recipe& recipe, const Team& team, int64_t rows,
         int64_t cols)
      : kernels_(kernels),
        recipe_(recipe),
        team_(team),
        gram_(take(rows, rows), kernels, rows, rows),
        z_(take(rows, rows), kernels, rows, rows),
        x_(take(rows, cols), kernels, rows, cols),
        transposed_(take(cols, rows), kernels, cols, rows),
        gram_operand_(kernels, recipe.bfloat16, gram_, shared()),
        z_operand_(kernels, recipe.bfloat16, z_, shared()),
        transposed_operand_(kernels, recipe.bfloat16, transposed_, shared()) {}

  static Demand demand(const TileKernels& kernels, const Recipe& recipe, const View& in,
                       const View&) {
    const auto rounding = [&](int64_t rows, int64_t lanes) {
      return Operand::floats(kernels, recipe.bfloat16, rows, lanes);
    };
    const int64_t strip = strip_floats(kernels, in.rows) + rounding(in.rows, strip_lanes(kernels));
    const int64_t square = Arena::rounded(Panels::floats(kernels, in.rows, in.rows));
    return {.first = 2 * square + Arena::rounded(Panels::floats(kernels, in.rows, in.cols)) +
                     Arena::rounded(Panels::floats(kernels, in.cols, in.rows)) +
                     2 * rounding(in.rows, in.rows) + rounding(in.cols, in.rows) + strip,
            .others = strip};
  }

  void run(const View& in, const View& out, float factor) {
    for_each_strip([&](int64_t at, const Panels& strip, Arena&) {
      pack(kernels_, in, 0, at, factor, strip);
      keep_transpose(at, strip);
    });
    for (int i = 0; i < recipe_.steps; ++i) step(recipe_.coefficients.row(i));
    for_each_strip([&](int64_t at, const Panels& strip, Arena&) {
      if (out.wide()) {
        unpack(kernels_, strip, out, 0, at);
      } else {
        unpack(kernels_, transposed_.rows_from(at, strip.lanes), out.transposed(), at, 0);
      }
    });
  }

 private:
  Arena& shared() const { return team_.arenas[team_.first]; }
  float* take(int64_t depth, int64_t lanes) {
    return shared().take(Panels::floats(kernels_, depth, lanes));
  }

  void multiply_self(const Operand& x, double alpha, double beta, const Panels& c,
                     const Panels& out) const {
    x.round(team_.count);
    multiply_symmetric(kernels_,
                       {.a = x.panels(),
                        .b = x.panels(),
                        .alpha = static_cast<float>(alpha),
                        .beta = static_cast<float>(beta),
                        .c = c,
                        .out = out,
                        .pairs = recipe_.bfloat16},
                       /*mirror=*/true, team_.count);
  }

  void step(const CoefficientRow& row) {
    const auto [a, b, c] = row;
    multiply_self(transposed_operand_, 1, 0, gram_, gram_);
    multiply_self(gram_operand_, c, b, gram_, z_);
    z_operand_.round(team_.count);
    for_each_strip([&, a = a](int64_t at, const Panels& strip, Arena& arena) {
      const Panels before(arena.take(strip_floats(kernels_, strip.depth)), kernels_, strip.depth,
                          strip.lanes);
      const Operand x(kernels_, recipe_.bfloat16, before, arena);
      std::copy_n(strip.data, strip.count() * strip.stride, before.data);
      x.round();
      multiply_rows(kernels_,
                    {.a = z_operand_.panels(),
                     .b = x.panels(),
                     .beta = static_cast<float>(a),
                     .c = before,
                     .out = strip,
                     .pairs = recipe_.bfloat16},
                    0, strip.padded_depth);
      keep_transpose(at, strip);
    });
  }

  void keep_transpose(int64_t at, const Panels& strip) const {
    transpose(kernels_, strip, transposed_.rows_from(at, strip_lanes(kernels_)));
  }

  // task(first column, those panels of X, the thread's arena)
  template <class Task>
  void for_each_strip(const Task& task) {
    const int64_t lanes = strip_lanes(kernels_);
    for_each(team_.count, strips_of(x_.lanes, lanes), [&](int64_t index, int thread) {
      Arena& arena = team_.arenas[team_.first + thread];
      const int64_t mark = arena.taken();
      task(index * lanes, x_.lanes_from(index * lanes, lanes), arena);
      arena.give_back_to(mark);
    });
  }

  const TileKernels& kernels_;
  const Recipe& recipe_;
  const Team& team_;
  Panels gram_, z_, x_, transposed_;
  Operand gram_operand_, z_operand_, transposed_operand_;
};

}  // namespace

Demand demand(const TileKernels& kernels, const Recipe& recipe, const View& in, const View& out) {
  return recipe.form == NsAlgorithm::gram ? Gram::demand(kernels, recipe, in, out)
                                          : Direct::demand(kernels, recipe, in, out);
}

void orthogonalise(const TileKernels& kernels, const Recipe& recipe, const View& in,
                   const View& out, float inverse_norm, const Team& team) {
  Arena& arena = team.arenas[team.first];
  const int64_t mark = arena.taken();
  if (recipe.form == NsAlgorithm::gram) {
    Gram(kernels, recipe, team, in.rows, in.cols).run(in, out, inverse_norm);
  } else {
    Direct(kernels, recipe, team, in.rows, in.cols).run(in, out, inverse_norm);
  }
  arena.give_back_to(mark);
}

}  // namespace dmuon::cpu
