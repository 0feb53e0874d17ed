// Each kernel proves itself on this machine before its first result is used.
#pragma once
#include "kernels/cpu/panels.h"
#include "kernels/cpu/recipe.h"

namespace dmuon::cpu {

// The relative error, by the Frobenius norm, of these kernels with this recipe on a fixed matrix of
// these sizes, against the float64 reference.
double error_of(const TileKernels& kernels, const Recipe& recipe, int64_t rows, int64_t cols);

// Whether the kernels of `recipe` got a matrix of this class right. The classes: the level of
// instructions, the form, the precision, wide or tall, and whether the short dim fits into a panel,
// into one block of depth, or neither. The first call for a class runs error_of for it, which takes
// milliseconds; where the error is larger than rounding explains, it warns once.
bool trusted(const Recipe& recipe, int64_t rows, int64_t cols);

// As if the check of this class had ended so. For tests.
void set_verdict(const Recipe& recipe, int64_t rows, int64_t cols, bool trusted);

// What is known so far, without a check: true for a class that has not been used.
bool not_distrusted(const Recipe& recipe, int64_t rows, int64_t cols);

}  // namespace dmuon::cpu
