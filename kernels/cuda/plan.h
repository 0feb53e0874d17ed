// What Newton-Schulz does on a GPU, decided before it runs: products and passes over matrices that
// lie in one workspace. A pure function of shape and machine, without torch and without CUDA, so
// that a CPU can interpret a plan and compare.
//
// X, [rows, cols], is never transposed: its Gram matrix is taken over its shorter side, `order`.
// Matrices are row-major and padded with zeros, which Newton-Schulz leaves zero: the order to a
// whole number of equal blocks, the other side to a multiple of 8 elements, so that every row
// begins at 16 bytes and every block is a matrix that tensor cores take as it is.
//
// Symmetric products compute the blocks on and below the diagonal, all of one size and therefore in
// one batched call, and a pass mirrors them. Unmirrored (blocks = 1) they are whole products.
//
// float16 keeps two powers of two: X is 2^x_shift times as large as in the formulas, which lifts
// entries of about 1 / sqrt(rows cols) out of the subnormal range, and R is 2^r_shift times as
// large. Nothing overflows as long as no singular value on the way exceeds 3.9.
#pragma once
#include <array>
#include <compare>
#include <cstdint>
#include <variant>
#include <vector>

#include "kernels/cuda/blocks.h"

namespace dmuon::cuda {

struct Problem {
  int64_t batch = 1, rows = 0, cols = 0;            // none is 0
  std::vector<std::array<double, 3>> coefficients;  // (a, b, c), one row per step
  std::vector<int> restarts;                        // as NewtonSchulz::restarts
  bool gram = true;                                 // false: direct, whatever it costs
  Element input = Element::float32;
  // Of X and of the products with it. The square matrices of gram are float16 beside float16 and
  // float32 otherwise; those of direct are as X is.
  Element x = Element::float16;

  auto operator<=>(const Problem&) const = default;
};

struct Machine {
  int64_t multiprocessors = 132;
  bool pointer_arrays = true;                 // false: no blocks
  int64_t smallest_block = 256;               // narrower ones leave tensor cores idle
  int64_t block_multiple = 64;                // their sides are multiples of it; itself one of 8
  int64_t library_bytes = int64_t{32} << 20;  // scratch of one product
};

enum class Name : int { input, output, x, x_spare, r, z, q, spare, factor };
inline constexpr int kNames = 9;

// A batch of matrices, one after the other. Input and output are the caller's: no padding there,
// and offset counts from their own start.
struct Matrix {
  Element element = Element::float32;
  int64_t rows = 0, cols = 0, offset = 0;

  int64_t elements() const { return rows * cols; }
};

// to = input * factor * scale, zeros beyond the input. The factors are 1 / |x|_F, in float64: 1 for
// a matrix of zeros, NaN for one that holds a NaN or an infinity.
struct Import {
  Name to;
  double scale;
};

enum class Form { nn, nt, tn };  // A B, A B^T, A^T B

// d = alpha A B + beta c, all [m, n, k] of which the matrices may be larger.
struct Product {
  Form form;
  Name a, b, c, d;  // c is d where beta is 0
  double alpha, beta;
  int64_t m, n, k;
  int list = -1;  // of Plan::lists, and then m and n are those of one block; -1: the whole product
};

// Mirrors the lower triangle of `of`. Where also != of, it becomes `of` plus diagonal * I.
struct Finish {
  Name of, also;
  double diagonal;
  bool mirror;
};

struct Convert {
  Name from, to;
};

// output = from * scale, without the padding
struct Export {
  Name from;
  double scale;
};

using Step = std::variant<Import, Product, Finish, Convert, Export>;

struct Plan {
  Problem problem;
  bool gram = false;
  int blocks = 1;  // per side of a symmetric matrix
  int x_shift = 0, r_shift = 0;
  std::array<Matrix, kNames> matrices;
  std::vector<Step> steps;
  std::vector<BlockList> lists;
  int64_t chunks = 1;                              // pieces whose squares are summed apart
  int64_t partials = 0, factors = 0, library = 0;  // offsets: float64 each; scratch of products
  int64_t workspace_bytes = 0;

  const Matrix& operator[](Name name) const { return matrices[static_cast<int>(name)]; }
  Matrix& operator[](Name name) { return matrices[static_cast<int>(name)]; }
};

// One way to do it. blocks: 1, or 4 to 8.
Plan plan_with(const Problem& problem, const Machine& machine, bool gram, int blocks);

// The cheapest one by the estimate below.
Plan make_plan(const Problem& problem, const Machine& machine);

// Nanoseconds, estimated for H200-class machines from peak rates: good for comparing plans.
double estimated_ns(const Plan& plan, const Machine& machine);

// As NewtonSchulz's chain_bounds, for a chain that may be `longest` steps long.
std::vector<int> bounds_of_chains(const std::vector<int>& restarts, int steps, int longest);

}  // namespace dmuon::cuda
