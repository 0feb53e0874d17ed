// Binds engine/optimizer.h.
#include "engine/optimizer.h"

#include "python/bindings/bindings.h"

namespace dmuon {

void bind_optimizer(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::enum_<Nonfinite>(m, "Nonfinite")
      .value("raise_", Nonfinite::raise)
      .value("skip", Nonfinite::skip)
      .value("propagate", Nonfinite::propagate);
  py::enum_<ShardedGram>(m, "ShardedGram")
      .value("never", ShardedGram::never)
      .value("beneficial", ShardedGram::beneficial)
      .value("always", ShardedGram::always);
  py::class_<GroupSettings>(m, "GroupSettings")
      .def(py::init([](double lr, double weight_decay, double momentum,
                       std::pair<double, double> betas, double eps) {
             return GroupSettings{lr, weight_decay, momentum, betas.first, betas.second, eps};
           }),
           py::kw_only(), py::arg("lr"), py::arg("weight_decay"), py::arg("momentum") = 0,
           py::arg("betas") = std::pair{0.0, 0.0}, py::arg("eps") = 0);
  py::class_<SymmetricGradients>(m, "SymmetricGradients")
      .def(py::init<>())
      .def_readwrite("tensors", &SymmetricGradients::tensors)
      .def_readwrite("indices", &SymmetricGradients::indices)
      .def_readwrite("names", &SymmetricGradients::names);
  py::class_<Optimizer, std::shared_ptr<Optimizer>>(m, "Optimizer")
      .def(py::init([](std::shared_ptr<Engine> engine, const NewtonSchulz& newton_schulz,
                       AdjustLr adjust_lr, bool nesterov, Nonfinite nonfinite,
                       ShardedGram sharded_gram, bool publish_async, std::vector<int32_t> groups) {
             return std::make_shared<Optimizer>(std::move(engine),
                                                OptimizerConfig{.newton_schulz = newton_schulz,
                                                                .adjust_lr = adjust_lr,
                                                                .nesterov = nesterov,
                                                                .nonfinite = nonfinite,
                                                                .sharded_gram = sharded_gram,
                                                                .publish_async = publish_async},
                                                std::move(groups));
           }),
           py::kw_only(), py::arg("engine"), py::arg("newton_schulz"), py::arg("adjust_lr"),
           py::arg("nesterov"), py::arg("nonfinite"), py::arg("sharded_gram"),
           py::arg("publish_async"), py::arg("groups"))
      .def("step", &Optimizer::step, py::arg("groups"), py::arg("symmetric"), py::arg("error") = "",
           Release())
      .def("state", &Optimizer::state, py::arg("matrix"))
      .def("in_shards", &Optimizer::in_shards)
      .def("tp_bytes",
           [](const Optimizer& o, const Engine& e, int matrix) {
             const OwnershipPlan& plan = e.plan();
             const TpBytes bytes =
                 tp_bytes(plan.matrices[matrix], e.slot(matrix).layout, plan.tp_owners[matrix],
                          static_cast<int>(plan.mesh.tp), o.config().newton_schulz);
             return std::pair(bytes.whole, bytes.in_shards);
           })
      .def("set_groups", &Optimizer::set_groups)
      .def("ns_workspace_bytes", &Optimizer::ns_workspace_bytes)
      .def("ns_calls", &Optimizer::ns_calls)
      .def("ns_calls_last_step", &Optimizer::ns_calls_last_step)
      .def("ns_calls_per_matrix", &Optimizer::ns_calls_per_matrix);
}

}  // namespace dmuon
