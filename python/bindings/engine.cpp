// Binds engine/engine.h.
#include "engine/engine.h"

#include "engine/error.h"
#include "python/bindings/bindings.h"

namespace dmuon {
namespace {

Channels make_channels(const std::string& materialise, const std::string& reduce,
                       const std::string& control, LaneKind kind, const at::Device& device,
                       FlightRing* ring) {
  const auto lane = [&](const char* name) {
    if (kind == LaneKind::inline_) return make_inline_lane(name);
    return kind == LaneKind::device ? make_device_lane(name, device) : make_host_lane(name);
  };
  return {.materialise = make_c10d_transport(materialise, ring),
          .reduce = make_c10d_transport(reduce, ring),
          .control = make_c10d_transport(control, ring),
          .materialise_lane = lane("materialise"),
          .reduce_lane = lane("reduce"),
          .publish_lane = lane("publish")};
}

py::dict counters(const Engine& engine) {
  const Counters& c = engine.counters();
  py::dict d;
  d["steps"] = c.steps;
  d["steps_without_gradient"] = c.steps_without_gradient;
  d["materialisations"] = c.materialisations;
  d["reductions"] = c.reductions;
  d["sent_bytes_last_step"] = c.sent_bytes_last_step;
  d["aborted_passes"] = c.aborted_passes;
  d["reduce_wait_us"] = c.reduce_wait_us;
  return d;
}

}  // namespace

void bind_engine(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::enum_<LaneKind>(m, "LaneKind")
      .value("host", LaneKind::host)
      .value("inline_", LaneKind::inline_)
      .value("device", LaneKind::device);
  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init([](const OwnershipPlan& plan, std::vector<std::vector<int32_t>> boundaries,
                       std::vector<bool> encloses, std::vector<int32_t> order,
                       std::shared_ptr<RuntimeAdapter> adapter, std::shared_ptr<FlightRing> ring,
                       const std::string& materialise, const std::string& reduce,
                       const std::string& control, LaneKind kind, const at::Device& device) {
             auto channels = make_channels(materialise, reduce, control, kind, device, ring.get());
             return std::make_shared<Engine>(EngineConfig{.plan = plan,
                                                          .boundaries = std::move(boundaries),
                                                          .encloses = std::move(encloses),
                                                          .order = std::move(order),
                                                          .adapter = std::move(adapter),
                                                          .ring = std::move(ring)},
                                             std::move(channels));
           }),
           py::kw_only(), py::arg("plan"), py::arg("boundaries"), py::arg("encloses"),
           py::arg("order"), py::arg("adapter"), py::arg("ring"), py::arg("materialise"),
           py::arg("reduce"), py::arg("control"), py::arg("lane_kind"), py::arg("device"),
           Release())
      .def("adopt", &Engine::adopt, py::arg("matrix"), py::arg("parameter"), Release())
      .def("wait_reductions", &Engine::wait_reductions, Release())
      .def("wait_publishes", &Engine::wait_publishes, Release())
      .def("reset", &Engine::reset, Release())
      .def("rank", &Engine::rank)
      .def("state", [](const Engine& e, int unit) { return to_string(e.state(unit)); })
      .def("shown", [](Engine& e, int unit) { return e.store(unit).shown(); })
      .def("adopted", [](Engine& e, int unit) { return e.store(unit).adopted(); })
      .def("unit_of", [](const Engine& e, int matrix) { return e.place(matrix).unit; })
      .def("master",
           [](Engine& e, int matrix) -> std::optional<at::Tensor> {
             const auto place = e.place(matrix);
             const at::Tensor master = e.store(place.unit).master(place.slot);
             return master.defined() ? std::optional(master) : std::nullopt;
           })
      .def("set_value", &Engine::set_value, py::arg("matrix"), py::arg("value"), Release())
      .def("counters", &counters);
}

}  // namespace dmuon
