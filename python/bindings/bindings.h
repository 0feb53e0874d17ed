// What the files of this folder share: each binds some headers, which its first lines name.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include "engine/lane.h"

namespace dmuon {

namespace py = pybind11;

// One lane for each group, kind and device, as long as anybody uses it: one thread issues to a
// group, in the program's order. "": a lane of its own; so is every inline one.
std::shared_ptr<Lane> lane_for(const std::string& group, const char* name, LaneKind kind,
                               const at::Device& device);

void bind_kernels(py::module_& m);
void bind_plan(py::module_& m);
void bind_config(py::module_& m);
void bind_agreement(py::module_& m);
void bind_flight_ring(py::module_& m);
void bind_step_clock(py::module_& m);
void bind_engine(py::module_& m);
void bind_optimizer(py::module_& m);
void bind_fsdp2(py::module_& m);
void bind_ddp(py::module_& m);
void bind_zero(py::module_& m);
void bind_hooks(py::module_& m);
void bind_gradients(py::module_& m);

}  // namespace dmuon
