// Binds engine/gradients.h, and finds the local tensors behind the gradients of Python parameters.
#include "engine/gradients.h"

#include <torch/csrc/autograd/python_variable.h>

#include "engine/optimizer.h"
#include "python/bindings/bindings.h"

namespace dmuon {
namespace {

py::object local_tensor(const py::object& tensor) {
  return py::getattr(tensor, "_local_tensor", tensor);
}

template <class F>
void for_each_gradient(const py::list& parameters, const F& f) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const py::object gradient = parameters[i].attr("grad");
    if (!gradient.is_none()) f(i, gradient);
  }
}

void read_symmetric(SymmetricGradients& symmetric, const py::list& parameters) {
  symmetric.tensors.clear();
  symmetric.indices.clear();
  for_each_gradient(parameters, [&](size_t i, const py::object& gradient) {
    symmetric.tensors.push_back(local_tensor(gradient).cast<at::Tensor>());
    symmetric.indices.push_back(static_cast<int32_t>(i));
  });
}

// counts[i]: whether this rank counts the elements of parameter i.
GradientSet gradient_set(std::vector<int32_t> matrices, const py::list& symmetric,
                         const std::vector<bool>& counts) {
  GradientSet set{.matrices = std::move(matrices)};
  for_each_gradient(symmetric, [&](size_t i, const py::object& gradient) {
    auto& part = counts.at(i) ? set.counted : set.copies;
    part.push_back(local_tensor(gradient).cast<at::Tensor>());
  });
  return set;
}

}  // namespace

void bind_gradients(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<GradientSet>(m, "GradientSet")
      .def(py::init(&gradient_set), py::arg("matrices"), py::arg("symmetric"), py::arg("counts"));
  m.def("gradient_norm", &gradient_norm, py::arg("engine"), py::arg("set"), py::arg("p"),
        Release());
  m.def("clip_gradients", &clip_gradients, py::arg("engine"), py::arg("set"), py::arg("max_norm"),
        py::arg("p"), py::arg("error_if_nonfinite"), Release());
  m.def("scale_gradients", &scale_gradients, py::arg("engine"), py::arg("set"), py::arg("factor"),
        Release());
  m.def("read_symmetric", &read_symmetric, py::arg("symmetric"), py::arg("parameters"));
}

}  // namespace dmuon
