// What module.cpp puts together.
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm {

void bind_errors();
void bind_kernels(pybind11::module_& module);
void bind_accumulation(pybind11::module_& module);
void bind_codes(pybind11::module_& module);
void bind_hashes(pybind11::module_& module);
void bind_steps(pybind11::module_& module);
void bind_transport(pybind11::module_& module);
void bind_nccl(pybind11::module_& module);     // only in builds with CUDA
void bind_streams(pybind11::module_& module);  // likewise
void bind_build_info(pybind11::module_& module);

}  // namespace pycomm
