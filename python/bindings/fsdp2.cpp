// Binds adapters/fsdp2/fsdp2_adapter.h.
#include "adapters/fsdp2/fsdp2_adapter.h"
#include "python/bindings/bindings.h"

namespace dmuon {

void bind_fsdp2(py::module_& m) {
  py::class_<RuntimeAdapter, std::shared_ptr<RuntimeAdapter>>(m, "RuntimeAdapter");
  py::class_<UnitDtypes>(m, "UnitDtypes")
      .def_readwrite("compute_dtype", &UnitDtypes::compute_dtype)
      .def_readwrite("reduce_dtype", &UnitDtypes::reduce_dtype);
  py::class_<Fsdp2Unit>(m, "Fsdp2Unit")
      .def_readwrite("reshard_after_forward", &Fsdp2Unit::reshard_after_forward)
      .def_readwrite("requires_gradient_sync", &Fsdp2Unit::requires_gradient_sync)
      .def_readwrite("gradient_divide_factor", &Fsdp2Unit::gradient_divide_factor)
      .def_readwrite("compute_dtype", &Fsdp2Unit::compute_dtype)
      .def_readwrite("reduce_dtype", &Fsdp2Unit::reduce_dtype);
  py::class_<Fsdp2Adapter, RuntimeAdapter, std::shared_ptr<Fsdp2Adapter>>(m, "Fsdp2Adapter")
      .def(py::init<int, double>(), py::arg("units"), py::arg("divisor"))
      .def("unit", &Fsdp2Adapter::unit, py::return_value_policy::reference_internal)
      .def("enter_no_sync", &Fsdp2Adapter::enter_no_sync)
      .def("leave_no_sync", &Fsdp2Adapter::leave_no_sync);
}

}  // namespace dmuon
