// Binds engine/agreement.h.
#include "engine/agreement.h"

#include "python/bindings/bindings.h"

namespace dmuon {

void bind_agreement(py::module_& m) {
  m.def(
      "agree",
      [](const std::string& group, std::vector<std::string> lines, std::string error,
         std::string subject, std::string advice) {
        agree(*make_c10d_transport(group, nullptr), {.lines = std::move(lines),
                                                     .error = std::move(error),
                                                     .subject = std::move(subject),
                                                     .advice = std::move(advice)});
      },
      py::arg("group"), py::arg("lines"), py::arg("error") = "", py::arg("subject") = "agree",
      py::arg("advice") = "", py::call_guard<py::gil_scoped_release>());
  m.def(
      "from_rank_0",
      [](const std::string& group, std::vector<int32_t> values) {
        return from_rank_0(*make_c10d_transport(group, nullptr), std::move(values));
      },
      py::arg("group"), py::arg("values"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace dmuon
