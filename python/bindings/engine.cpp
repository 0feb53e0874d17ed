// Binds engine/engine.h.
#include "engine/engine.h"

#include <unistd.h>

#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "engine/error.h"
#include "python/bindings/bindings.h"

namespace dmuon {

std::shared_ptr<Lane> lane_for(const std::string& group, const char* name, LaneKind kind,
                               const at::Device& device) {
  const auto make = [&]() -> std::shared_ptr<Lane> {
    if (kind == LaneKind::inline_) return make_inline_lane(name);
    return kind == LaneKind::device ? make_device_lane(name, device) : make_host_lane(name);
  };
  if (group.empty() || kind == LaneKind::inline_) return make();
  static std::mutex mutex;
  using Key = std::tuple<std::string, LaneKind, std::string, pid_t>;
  static std::map<Key, std::weak_ptr<Lane>> lanes;
  std::lock_guard lock(mutex);
  std::weak_ptr<Lane>& known = lanes[Key{group, kind, device.str(), ::getpid()}];
  std::shared_ptr<Lane> lane = known.lock();
  if (!lane) known = lane = make();
  return lane;
}

namespace {

// Names of process groups; "" where an axis has one rank.
struct GroupNames {
  std::string materialise, reduce, replicate_reduce, publish, tp_gather, tp_scatter, control;
};

Channels make_channels(const GroupNames& names, LaneKind kind, const at::Device& device,
                       FlightRing* ring) {
  const auto transport = [&](const std::string& name, Channel channel) {
    return name.empty() ? nullptr : make_c10d_transport(name, ring, channel);
  };
  const auto within = [&](const std::string& name, Channel channel) {
    return name.empty() ? make_local_transport() : transport(name, channel);
  };
  return {.materialise = within(names.materialise, Channel::materialise),
          .reduce = within(names.reduce, Channel::reduce),
          .replicate_reduce = transport(names.replicate_reduce, Channel::replicate_reduce),
          .publish = transport(names.publish, Channel::publish),
          .tp_gather = transport(names.tp_gather, Channel::tp_gather),
          .tp_scatter = transport(names.tp_scatter, Channel::tp_scatter),
          .control = transport(names.control, Channel::control),
          .materialise_lane = lane_for("", "materialise", kind, device),
          .reduce_lane = lane_for(names.replicate_reduce, "reduce", kind, device),
          .publish_lane = lane_for(names.publish, "publish", kind, device),
          .tp_lane = lane_for(names.tp_gather, "tp", kind, device)};
}

// (dim or None, sizes, [[(start, length), ...] per TP rank])
TpLayout make_layout(const py::tuple& layout) {
  if (layout[0].is_none()) return {};
  TpLayout result{.dim = layout[0].cast<int>(), .sizes = layout[1].cast<std::vector<int64_t>>()};
  using Pairs = std::vector<std::pair<int64_t, int64_t>>;
  for (const auto& pairs : layout[2].cast<std::vector<Pairs>>()) {
    auto& ranges = result.ranges.emplace_back();
    for (const auto& [start, length] : pairs) ranges.push_back({start, length});
  }
  return result;
}

// A parameter that is a DTensor.
class DTensorWrapper final : public TensorWrapper {
 public:
  // `from_local(tensor)` makes a DTensor laid out as the parameter is.
  DTensorWrapper(py::object placements, py::object from_local)
      : placements_(std::move(placements)), from_local_(std::move(from_local)) {}

  ~DTensorWrapper() override {
    if (Py_IsInitialized()) {
      py::gil_scoped_acquire acquire;
      placements_ = py::object();
      from_local_ = py::object();
    } else {
      placements_.release();
      from_local_.release();
    }
  }

  at::Tensor unwrap(const at::Tensor& gradient) override {
    py::gil_scoped_acquire acquire;
    py::object given = py::cast(gradient);
    if (!py::hasattr(given, "placements")) return gradient;
    if (!py::object(given.attr("placements")).equal(placements_)) {
      given = given.attr("redistribute")(py::arg("placements") = placements_);
    }
    py::object local = given.attr("_local_tensor");
    if (py::hasattr(local, "wait")) local = local.attr("wait")();
    return local.cast<at::Tensor>();
  }

  at::Tensor wrap(const at::Tensor& local) override {
    py::gil_scoped_acquire acquire;
    return from_local_(local).cast<at::Tensor>();
  }

 private:
  py::object placements_, from_local_;
};

py::dict counters(const Engine& engine) {
  const Counters& c = engine.counters();
  py::dict d;
  d["steps"] = c.steps;
  d["steps_without_gradient"] = c.steps_without_gradient;
  d["materialisations"] = c.materialisations;
  d["prefetches"] = c.prefetches;
  d["reductions"] = c.reductions;
  d["sent_bytes_last_step"] = c.sent_bytes_last_step;
  d["aborted_passes"] = c.aborted_passes;
  d["reduce_wait_us"] = c.reduce_wait_us;
  d["tp_gather_us"] = c.tp_gather_us;
  d["tp_wait_us"] = c.tp_wait_us;
  d["tp_regathers"] = c.tp_regathers;
  return d;
}

}  // namespace

void bind_engine(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::enum_<LaneKind>(m, "LaneKind")
      .value("host", LaneKind::host)
      .value("inline_", LaneKind::inline_)
      .value("device", LaneKind::device);
  py::class_<GroupNames>(m, "GroupNames")
      .def(py::init<>())
      .def_readwrite("materialise", &GroupNames::materialise)
      .def_readwrite("reduce", &GroupNames::reduce)
      .def_readwrite("replicate_reduce", &GroupNames::replicate_reduce)
      .def_readwrite("publish", &GroupNames::publish)
      .def_readwrite("tp_gather", &GroupNames::tp_gather)
      .def_readwrite("tp_scatter", &GroupNames::tp_scatter)
      .def_readwrite("control", &GroupNames::control);
  py::class_<TensorWrapper, std::shared_ptr<TensorWrapper>>(m, "TensorWrapper");
  py::class_<DTensorWrapper, TensorWrapper, std::shared_ptr<DTensorWrapper>>(m, "DTensorWrapper")
      .def(py::init<py::object, py::object>(), py::arg("placements"), py::arg("from_local"));
  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init([](const OwnershipPlan& plan, std::vector<std::vector<int32_t>> boundaries,
                       std::vector<bool> encloses, std::vector<int32_t> order,
                       std::shared_ptr<RuntimeAdapter> adapter, std::shared_ptr<FlightRing> ring,
                       const GroupNames& groups, LaneKind kind, const at::Device& device,
                       std::array<int, 3> position, const std::vector<py::tuple>& layouts,
                       bool share_gather_staging, bool share_scatter_staging) {
             EngineConfig config{.plan = plan,
                                 .boundaries = std::move(boundaries),
                                 .encloses = std::move(encloses),
                                 .order = std::move(order),
                                 .adapter = std::move(adapter),
                                 .ring = ring,
                                 .position = {position[0], position[1], position[2]},
                                 .share_gather_staging = share_gather_staging,
                                 .share_scatter_staging = share_scatter_staging};
             for (const auto& layout : layouts) config.layouts.push_back(make_layout(layout));
             py::gil_scoped_release release;
             return std::make_shared<Engine>(std::move(config),
                                             make_channels(groups, kind, device, ring.get()));
           }),
           py::kw_only(), py::arg("plan"), py::arg("boundaries"), py::arg("encloses"),
           py::arg("order"), py::arg("adapter"), py::arg("ring"), py::arg("groups"),
           py::arg("lane_kind"), py::arg("device"), py::arg("position"), py::arg("layouts"),
           py::arg("share_gather_staging"), py::arg("share_scatter_staging"))
      .def("adopt",
           py::overload_cast<int, const at::Tensor&, const at::Tensor&,
                             std::shared_ptr<TensorWrapper>>(&Engine::adopt),
           py::arg("matrix"), py::arg("parameter"), py::arg("inner"), py::arg("wrapper"), Release())
      .def("tp_staging",
           [](const Engine& e) {
             using Row = std::tuple<std::string, bool, int64_t, int64_t>;
             const auto row = [](const char* direction, const Engine::StagingUse& use) {
               return Row(direction, use.shared, use.largest, use.total);
             };
             return std::vector{row("gather", e.gather_use()), row("scatter", e.scatter_use())};
           })
      .def("leads", [](Engine& e, int matrix) { return e.slot(matrix).leads; })
      .def("publish_all", &Engine::publish_all, Release())
      .def("spread_values", &Engine::spread_values, Release())
      .def("show_residents", &Engine::show_residents, Release())
      .def("wait_reductions", &Engine::wait_reductions, Release())
      .def("reduce_accumulated", &Engine::reduce_accumulated, Release())
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
      .def("mark_changed", &Engine::mark_changed, py::arg("matrix"), Release())
      .def("clock", py::overload_cast<>(&Engine::clock),
           py::return_value_policy::reference_internal)
      .def("counters", &counters);
}

}  // namespace dmuon
