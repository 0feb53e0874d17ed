// Binds engine/plan.h.
#include "engine/plan.h"

#include "python/bindings/bindings.h"

namespace dmuon {

void bind_plan(py::module_& m) {
  py::enum_<Route>(m, "Route").value("muon", Route::muon).value("adamw", Route::adamw);
  py::enum_<OwnerStrategy>(m, "OwnerStrategy")
      .value("lpt", OwnerStrategy::lpt)
      .value("round_robin", OwnerStrategy::round_robin);
  py::enum_<CostModel>(m, "CostModel")
      .value("optimizer", CostModel::optimizer)
      .value("numel", CostModel::numel);
  py::class_<Matrix>(m, "Matrix")
      .def(py::init<>())
      .def_readwrite("name", &Matrix::name)
      .def_readwrite("unit", &Matrix::unit)
      .def_readwrite("layer", &Matrix::layer)
      .def_readwrite("batch", &Matrix::batch)
      .def_readwrite("rows", &Matrix::rows)
      .def_readwrite("cols", &Matrix::cols)
      .def_readwrite("state_bytes", &Matrix::state_bytes)
      .def_readwrite("shard_bytes", &Matrix::shard_bytes)
      .def_readwrite("route", &Matrix::route)
      .def_readwrite("dtype", &Matrix::dtype);
  py::class_<PlanPolicy>(m, "PlanPolicy")
      .def(py::init<>())
      .def_readwrite("strategy", &PlanPolicy::strategy)
      .def_readwrite("cost_model", &PlanPolicy::cost_model)
      .def_readwrite("max_owners_per_group", &PlanPolicy::max_owners_per_group)
      .def_readwrite("memory_limit_bytes", &PlanPolicy::memory_limit_bytes)
      .def_readwrite("pack", &PlanPolicy::pack)
      .def_readwrite("ns_steps", &PlanPolicy::ns_steps)
      .def_readwrite("symmetric_products", &PlanPolicy::symmetric_products);
  py::class_<Segment>(m, "Segment")
      .def_readonly("owner", &Segment::owner)
      .def_readonly("matrices", &Segment::matrices);
  py::class_<Unit>(m, "Unit")
      .def_readonly("name", &Unit::name)
      .def_readonly("segments", &Unit::segments);
  py::class_<PlanReport>(m, "PlanReport")
      .def_readonly("max_load", &PlanReport::max_load)
      .def_readonly("mean_load", &PlanReport::mean_load)
      .def_readonly("w_star", &PlanReport::w_star)
      .def_readonly("lower_bound", &PlanReport::lower_bound)
      .def_readonly("max_state_bytes", &PlanReport::max_state_bytes)
      .def_readonly("state_bytes_bound", &PlanReport::state_bytes_bound);
  py::class_<OwnershipPlan>(m, "OwnershipPlan")
      .def_readonly("matrices", &OwnershipPlan::matrices)
      .def_readonly("costs", &OwnershipPlan::costs)
      .def_readonly("owners", &OwnershipPlan::owners)
      .def_readonly("tp_owners", &OwnershipPlan::tp_owners)
      .def_readonly("units", &OwnershipPlan::units)
      .def_readonly("report", &OwnershipPlan::report)
      .def_property_readonly("pack", [](const OwnershipPlan& plan) { return plan.policy.pack; })
      .def_property_readonly("cells", [](const OwnershipPlan& plan) { return plan.mesh.cells(); })
      .def("loads", &OwnershipPlan::loads)
      .def("state_bytes", &OwnershipPlan::state_bytes)
      .def("find", &OwnershipPlan::find)
      .def("digest", [](const OwnershipPlan& plan) { return plan.digest.hex(); });
  m.def(
      "make_plan",
      [](std::vector<Matrix> matrices, int64_t shard, int64_t replicate, int64_t tp,
         const PlanPolicy& policy) {
        return make_plan(std::move(matrices), {.shard = shard, .replicate = replicate, .tp = tp},
                         policy);
      },
      py::kw_only(), py::arg("matrices"), py::arg("shard"), py::arg("replicate"), py::arg("tp"),
      py::arg("policy"), py::call_guard<py::gil_scoped_release>());
  m.def("layer_of", &layer_of, py::arg("parameter"), py::arg("containers"));
}

}  // namespace dmuon
