// Times that mean something on a machine that others use too: the best of many, interleaved.
#pragma once
#include <functional>
#include <string>
#include <vector>

namespace dmuon::bench {

enum class Clock { thread_cpu, wall };

// Seconds of the fastest of `rounds` runs of each, taken in turn.
std::vector<double> fastest(Clock clock, int rounds,
                            const std::vector<std::function<void()>>& runs);

// GFLOP/s of one core on independent multiply-adds in registers, at a level of instructions.
struct Peak {
  double float32 = 0;
  double bfloat16 = 0;  // 0 where there is no such instruction
};
Peak measure_peak();

// "Intel(R) Xeon(R) Processor, 2 cores"
std::string machine();

// One line of the table, with a verdict where there is a limit. Counts those that miss.
class Table {
 public:
  enum class Want { at_least, at_most, nothing };
  void row(const std::string& what, double got, Want want = Want::nothing, double limit = 0);
  void heading(const std::string& text) const;
  int missed() const { return missed_; }

 private:
  int missed_ = 0;
};

}  // namespace dmuon::bench
