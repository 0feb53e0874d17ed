// Binds engine/flight_ring.h.
#include "engine/flight_ring.h"

#include "python/bindings/bindings.h"

namespace dmuon {

void bind_flight_ring(py::module_& m) {
  py::class_<FlightRing, std::shared_ptr<FlightRing>>(m, "FlightRing")
      .def(py::init<size_t>(), py::arg("capacity") = 2048)
      .def("dump", &FlightRing::dump, py::arg("last") = 2048)
      .def("total_operations", &FlightRing::total_operations)
      .def("total_sent_bytes", &FlightRing::total_sent_bytes, py::arg("unit_prefix") = "");
}

}  // namespace dmuon
