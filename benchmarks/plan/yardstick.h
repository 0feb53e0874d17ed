// What plans are held against: LPT as the textbook has it, an exact search, and the rules that
// every plan keeps. Written apart from engine/assign*, with none of its code.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/plan.h"

namespace dmuon::bench {

double plain_lpt(std::vector<double> costs, int64_t slots);

// How many different values there are.
size_t different(std::vector<double> costs);

// The largest load of a cell's ranks over that of LPT on the cell's own matrices, in the worst
// cell.
double worst_cell_over_lpt(const OwnershipPlan& plan);

// Ends the program where the plan lost a matrix, is worse than LPT anywhere, lies below its bound
// or leaves a rank idle while another holds two.
void require_sound(const OwnershipPlan& plan, size_t matrices);

enum class Optimum { bound_met, proved, open };

// Whether the plan's largest load is the least there is: it is the lower bound, or no assignment
// keeps a load that is smaller by 1e-9 of it, because ranks have no room for that many whole pieces
// of one size, or because a search that fills rank after rank in every way finds none. The search
// remembers what cannot be finished; it gives up (`open`) on long lists and beyond a fixed number
// of steps. Ends the program where it finds a better assignment. Without matrices on the adamw
// route.
Optimum optimum(const OwnershipPlan& plan);

}  // namespace dmuon::bench
