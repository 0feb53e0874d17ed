// The two kinds of failure a caller can meet. A broken invariant of ours is an assertion instead.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace dmuon {

// The caller can fix it: a wrong argument, a wrong order of calls. ValueError in Python.
struct ConfigError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A device, a collective or a peer failed. RuntimeError in Python.
struct RuntimeFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace dmuon
