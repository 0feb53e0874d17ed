// Binds engine/step_clock.h. Seconds, by name.
#include "engine/step_clock.h"

#include "python/bindings/bindings.h"

namespace dmuon {
namespace {

double seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

py::dict phases(const StepTimes& times) {
  py::dict d;
  for (int i = 0; i < kPhases; ++i) d[to_string(Phase(i))] = seconds(times.phase_ns[i]);
  return d;
}

py::dict beside(const StepTimes& times) {
  py::dict d;
  for (int i = 0; i < kBesides; ++i) {
    py::dict what;
    what["seconds"] = seconds(times.beside_ns[i]);
    what["hidden_seconds"] = seconds(times.hidden_ns[i]);
    d[to_string(Beside(i))] = what;
  }
  return d;
}

double waiting(const StepTimes& times) {
  int64_t ns = 0;
  for (int i = 0; i < kPhases; ++i) ns += waits(Phase(i)) ? times.phase_ns[i] : 0;
  return seconds(ns);
}

py::dict last_step(const StepClock& clock) {
  const StepTimes times = clock.last_step();
  py::dict d;
  d["seconds"] = seconds(times.total_ns);
  d["phases"] = phases(times);
  d["waiting_seconds"] = waiting(times);
  d["beside"] = beside(times);
  return d;
}

// (beside the training thread, what, begin, end)
py::list spans(const StepClock& clock) {
  py::list all;
  for (const auto& span : clock.last_step().spans) {
    const char* what = span.beside ? to_string(Beside(span.what)) : to_string(Phase(span.what));
    all.append(py::make_tuple(span.beside, what, seconds(span.begin_ns), seconds(span.end_ns)));
  }
  return all;
}

}  // namespace

void bind_step_clock(py::module_& m) {
  py::class_<StepClock>(m, "StepClock")
      .def("end_step", &StepClock::end_step)
      .def("steps", &StepClock::steps)
      .def("last_step", &last_step)
      .def("spans", &spans);
  py::list waiting;
  for (int i = 0; i < kPhases; ++i) {
    if (waits(Phase(i))) waiting.append(to_string(Phase(i)));
  }
  m.attr("WAITING_PHASES") = py::tuple(waiting);
}

}  // namespace dmuon
