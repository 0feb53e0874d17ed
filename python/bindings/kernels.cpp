// Binds kernels/newton_schulz.h, kernels/device_newton_schulz.h and kernels/momentum.h.
#include "kernels/checks.h"
#include "kernels/device_newton_schulz.h"
#include "kernels/momentum.h"
#include "kernels/newton_schulz.h"
#include "python/bindings/bindings.h"

namespace dmuon {

void bind_kernels(py::module_& m) {
  m.attr("MOST_NS_STEPS") = kMostSteps;
  py::enum_<PastEnd>(m, "PastEnd")
      .value("repeat_last", PastEnd::repeat_last)
      .value("cycle", PastEnd::cycle);
  py::enum_<NsAlgorithm>(m, "NsAlgorithm")
      .value("gram", NsAlgorithm::gram)
      .value("direct", NsAlgorithm::direct);
  py::enum_<NsDtype>(m, "NsDtype")
      .value("automatic", NsDtype::automatic)
      .value("float32", NsDtype::float32)
      .value("bfloat16", NsDtype::bfloat16);
  py::enum_<AdjustLr>(m, "AdjustLr")
      .value("match_rms_adamw", AdjustLr::match_rms_adamw)
      .value("original", AdjustLr::original)
      .value("spectral_unclamped", AdjustLr::spectral_unclamped);
  py::class_<CoefficientSet>(m, "CoefficientSet")
      .def(py::init<std::string, std::vector<CoefficientRow>, PastEnd>(), py::arg("name"),
           py::arg("rows"), py::arg("past_end"))
      .def_readonly("name", &CoefficientSet::name)
      .def_readonly("rows", &CoefficientSet::rows)
      .def_readonly("past_end", &CoefficientSet::past_end);
  py::class_<NewtonSchulz>(m, "NewtonSchulz")
      .def(py::init<>())
      .def_readwrite("algorithm", &NewtonSchulz::algorithm)
      .def_readwrite("coefficients", &NewtonSchulz::coefficients)
      .def_readwrite("steps", &NewtonSchulz::steps)
      .def_readwrite("restarts", &NewtonSchulz::restarts)
      .def_readwrite("dtype", &NewtonSchulz::dtype)
      .def("validate", &NewtonSchulz::validate);
  m.def("polar_express_coefficients", &polar_express_coefficients);
  m.def("you_coefficients", &you_coefficients);
  m.def("jordan_coefficients", &jordan_coefficients);
  m.def("newton_schulz", py::overload_cast<const at::Tensor&, const NewtonSchulz&>(&newton_schulz),
        py::arg("x"), py::arg("options"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "newton_schulz_kernel_on",
      [](const std::string& device, int64_t batch, int64_t rows, int64_t cols,
         const NewtonSchulz& options) {
        return newton_schulz_kernel_on(c10::Device(device).type(), batch, rows, cols, options);
      },
      py::arg("device"), py::arg("batch"), py::arg("rows"), py::arg("cols"), py::arg("options"));
  m.def("load_device_newton_schulz", &load_device_newton_schulz, py::arg("path"));
  m.def("newton_schulz_kernel", &newton_schulz_kernel, py::arg("batch"), py::arg("rows"),
        py::arg("cols"), py::arg("options"));
}

}  // namespace dmuon
