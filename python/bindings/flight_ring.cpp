// Binds engine/flight_ring.h.
#include "engine/flight_ring.h"

#include "python/bindings/bindings.h"

namespace dmuon {
namespace {

py::dict as_dict(const FlightRecord& record) {
  py::dict d;
  d["sequence"] = record.sequence;
  d["step"] = record.step;
  d["op"] = to_string(record.op);
  d["channel"] = to_string(record.channel);
  d["unit"] = record.unit;
  d["root"] = record.root;
  d["sent_bytes"] = record.sent_bytes;
  d["start_us"] = record.start_us;
  d["duration_us"] = record.duration_us;
  return d;
}

py::list records(const FlightRing& ring) {
  py::list all;
  for (const auto& record : ring.records()) all.append(as_dict(record));
  return all;
}

py::dict sent_by_channel(const FlightRing& ring) {
  py::dict d;
  for (int c = 0; c < kChannels; ++c) {
    d[to_string(Channel(c))] = ring.total_sent_bytes(Channel(c));
  }
  return d;
}

}  // namespace

void bind_flight_ring(py::module_& m) {
  py::class_<FlightRing, std::shared_ptr<FlightRing>>(m, "FlightRing")
      .def(py::init<size_t>(), py::arg("capacity") = 2048)
      .def("dump", &FlightRing::dump, py::arg("last") = 2048)
      .def("total_operations", &FlightRing::total_operations)
      .def("records", &records)
      .def("sent_by_channel", &sent_by_channel)
      .def("total_sent_bytes",
           py::overload_cast<const std::string&>(&FlightRing::total_sent_bytes, py::const_),
           py::arg("unit_prefix") = "");
}

}  // namespace dmuon
