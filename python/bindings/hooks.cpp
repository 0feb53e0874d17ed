// What a module hook does, in one call: the checks and the walk over the output that need Python
// objects, then engine/engine.h.
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_set>

#include "engine/engine.h"
#include "python/bindings/bindings.h"

namespace dmuon {
namespace {

constexpr int kDeepestOutput = 8;

// Tensors in tuples, lists, dicts, sets, dataclasses and plain objects, with or without
// `__slots__`, nested; each object once.
class TensorSearch {
 public:
  std::vector<at::Tensor> run(py::handle output) {
    visit(output, kDeepestOutput);
    return std::move(found_);
  }

 private:
  void visit(py::handle object, int depth) {
    PyObject* const p = object.ptr();
    if (THPVariable_Check(p)) {
      found_.push_back(THPVariable_Unpack(p));
    } else if (depth == 0 || is_plain(p) || !seen_.insert(p).second) {
      return;
    } else if (PyDict_Check(p)) {
      for (const auto& item : py::reinterpret_borrow<py::dict>(object))
        visit(item.second, depth - 1);
    } else if (PyTuple_Check(p) || PyList_Check(p) || PyAnySet_Check(p)) {
      for (const auto& item : py::reinterpret_borrow<py::iterable>(object)) visit(item, depth - 1);
    } else {
      visit_fields(object, depth - 1);
    }
  }

  static bool is_plain(PyObject* p) {
    return p == Py_None || PyUnicode_Check(p) || PyBytes_Check(p) || PyLong_Check(p) ||
           PyFloat_Check(p) || PyType_Check(p) || PyFunction_Check(p) || PyCFunction_Check(p) ||
           PyMethod_Check(p) || PyModule_Check(p);
  }

  void visit_fields(py::handle object, int depth) {
    if (py::hasattr(object, "_forward_pre_hooks")) return;  // an nn.Module
    if (py::hasattr(object, "__dict__")) {
      for (const auto& item : py::dict(object.attr("__dict__"))) visit(item.second, depth);
    }
    for (const auto& type : py::type::of(object).attr("__mro__")) visit_slots(object, type, depth);
  }

  // By their descriptors: a class of a hierarchy has its own, under the names Python gave them.
  void visit_slots(py::handle object, py::handle type, int depth) {
    if (!PyType_HasFeature(reinterpret_cast<PyTypeObject*>(type.ptr()), Py_TPFLAGS_HEAPTYPE))
      return;
    for (const auto& item : py::dict(type.attr("__dict__"))) {
      if (!PyObject_TypeCheck(item.second.ptr(), &PyMemberDescr_Type)) continue;
      visit(py::getattr(object, item.first, py::none()), depth);
    }
  }

  std::vector<at::Tensor> found_;
  std::unordered_set<PyObject*> seen_;
};

struct SlotRef {
  py::dict parameters;  // the module's `_parameters`
  py::str name;
  py::object parameter;
};

// The work of one boundary's hooks. `settle()` is called before the first use; `replaced()` where a
// slot of a module holds another object than ours, and raises.
class BoundaryHook {
 public:
  BoundaryHook(std::shared_ptr<Engine> engine, int boundary, py::object settle, py::object replaced)
      : engine_(std::move(engine)),
        boundary_(boundary),
        settle_(std::move(settle)),
        replaced_(std::move(replaced)) {}

  void set_slots(const py::list& slots) {
    slots_.clear();
    for (const auto& item : slots) {
      const auto slot = py::reinterpret_borrow<py::tuple>(item);
      slots_.push_back({slot[0], slot[1], slot[2]});
    }
  }

  void enter() {
    if (!settled_) settle_();
    settled_ = true;
    if (!intact()) replaced_();
    py::gil_scoped_release release;
    engine_->enter(boundary_);
  }

  void leave(py::handle output) {
    const auto tensors = TensorSearch().run(output);
    py::gil_scoped_release release;
    engine_->leave(boundary_, tensors);
  }

 private:
  bool intact() const {
    for (const auto& slot : slots_) {
      if (PyDict_GetItem(slot.parameters.ptr(), slot.name.ptr()) != slot.parameter.ptr()) {
        return false;
      }
    }
    return true;
  }

  std::shared_ptr<Engine> engine_;
  int boundary_;
  py::object settle_, replaced_;
  bool settled_ = false;
  std::vector<SlotRef> slots_;
};

// What is registered on the module. No Python frame runs, so that none can be traced or compiled.
struct PreHook {
  std::shared_ptr<BoundaryHook> hook;
};
struct PostHook {
  std::shared_ptr<BoundaryHook> hook;
};

}  // namespace

void bind_hooks(py::module_& m) {
  py::class_<BoundaryHook, std::shared_ptr<BoundaryHook>>(m, "BoundaryHook")
      .def(py::init<std::shared_ptr<Engine>, int, py::object, py::object>(), py::kw_only(),
           py::arg("engine"), py::arg("boundary"), py::arg("settle"), py::arg("replaced"))
      .def("set_slots", &BoundaryHook::set_slots, py::arg("slots"))
      .def("enter", &BoundaryHook::enter)
      .def("leave", &BoundaryHook::leave, py::arg("output"));
  py::class_<PreHook>(m, "PreHook")
      .def(py::init<std::shared_ptr<BoundaryHook>>())
      .def("__call__", [](PreHook& self, py::handle, py::handle) { self.hook->enter(); });
  py::class_<PostHook>(m, "PostHook")
      .def(py::init<std::shared_ptr<BoundaryHook>>())
      .def("__call__", [](PostHook& self, py::handle, py::handle, py::handle output) {
        self.hook->leave(output);
      });
}

}  // namespace dmuon
