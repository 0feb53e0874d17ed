#include "benchmarks/kernels/measure.h"

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <thread>

namespace dmuon::bench {
namespace {

double seconds(Clock clock) {
  timespec now;
  clock_gettime(clock == Clock::wall ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

std::vector<double> fastest(Clock clock, int rounds,
                            const std::vector<std::function<void()>>& runs) {
  std::vector<double> best(runs.size(), std::numeric_limits<double>::infinity());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < runs.size(); ++i) {
      const double begin = seconds(clock);
      runs[i]();
      best[i] = std::min(best[i], seconds(clock) - begin);
    }
  }
  return best;
}

std::string machine() {
  std::ifstream info("/proc/cpuinfo");
  std::string model = "unknown processor";
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    model = line.substr(line.find(':') + 2);
    break;
  }
  return model + ", " + std::to_string(std::thread::hardware_concurrency()) + " cores";
}

void Table::heading(const std::string& text) const { std::printf("\n%s\n", text.c_str()); }

void Table::row(const std::string& what, double got, Want want, double limit) {
  std::printf("  %-58s %9.3f", what.c_str(), got);
  if (want != Want::nothing) {
    const bool met = want == Want::at_least ? got >= limit : got <= limit;
    missed_ += !met;
    std::printf("  %s %-6.4g %s", want == Want::at_least ? ">=" : "<=", limit, met ? "yes" : "NO");
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace dmuon::bench
