// Binds adapters/ddp/.
#include "adapters/ddp/ddp_adapter.h"
#include "adapters/ddp/replicas.h"
#include "python/bindings/bindings.h"

namespace dmuon {
namespace {

using Triple = std::tuple<at::Tensor, at::Tensor, std::shared_ptr<TensorWrapper>>;

std::shared_ptr<Replicas> make_replicas(const std::vector<Triple>& parameters,
                                        const std::string& group, LaneKind kind,
                                        const at::Device& device, int64_t bucket_bytes) {
  std::vector<ReplicatedParameter> replicated;
  for (const auto& [parameter, inner, wrapper] : parameters) {
    replicated.push_back({parameter, inner, wrapper});
  }
  std::shared_ptr<Lane> lane = lane_for(group, "replicas", kind, device);
  return std::make_shared<Replicas>(std::move(replicated), make_c10d_transport(group, nullptr),
                                    std::move(lane), bucket_bytes);
}

}  // namespace

void bind_ddp(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<DdpAdapter, RuntimeAdapter, std::shared_ptr<DdpAdapter>>(m, "DdpAdapter")
      .def(py::init<int, double>(), py::arg("units"), py::arg("ranks"))
      .def("unit", &DdpAdapter::unit, py::return_value_policy::reference_internal)
      .def("enter_no_sync", &DdpAdapter::enter_no_sync)
      .def("leave_no_sync", &DdpAdapter::leave_no_sync)
      .def("set_forward_sync", &DdpAdapter::set_forward_sync);
  py::class_<Replicas, std::shared_ptr<Replicas>>(m, "Replicas")
      .def(py::init(&make_replicas), py::kw_only(), py::arg("parameters"), py::arg("group"),
           py::arg("lane_kind"), py::arg("device"), py::arg("bucket_bytes"))
      .def("broadcast", &Replicas::broadcast, py::arg("tensors"), py::arg("name"), Release())
      .def("watch", &Replicas::watch)
      .def("set_synchronize", &Replicas::set_synchronize)
      .def("reductions", &Replicas::reductions);
}

}  // namespace dmuon
