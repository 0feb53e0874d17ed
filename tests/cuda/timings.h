#pragma once

namespace dmuon {

// Prints, per shape, the milliseconds of one Newton-Schulz in float16 by every plan that could have
// been chosen, replayed from a CUDA graph; of the chosen one called eagerly; and of the direct
// iteration written with torch's products in float16, from a graph too.
void print_timings();

}  // namespace dmuon
