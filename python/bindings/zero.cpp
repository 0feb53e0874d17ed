// Binds adapters/zero/.
#include <pybind11/functional.h>

#include "adapters/zero/zero_adapter.h"
#include "python/bindings/bindings.h"

namespace dmuon {

void bind_zero(py::module_& m) {
  py::enum_<Residency>(m, "Residency")
      .value("transient", Residency::transient)
      .value("resident", Residency::resident);
  py::class_<ZeroAdapter, RuntimeAdapter, std::shared_ptr<ZeroAdapter>>(m, "ZeroAdapter")
      .def(py::init<int, Residency, double>(), py::arg("units"), py::arg("residency"),
           py::arg("divisor"))
      .def("unit", &ZeroAdapter::unit, py::return_value_policy::reference_internal)
      .def("set_divisor", &ZeroAdapter::set_divisor)
      .def("set_reduces", &ZeroAdapter::set_reduces)
      .def("take_kept", &ZeroAdapter::take_kept)
      .def("residency", [](const ZeroAdapter& a) { return a.residency(0); });
}

}  // namespace dmuon
