// Parts of the compiled module, which module.cpp puts together; one for each of kernels/*.h.
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm {

void bind_errors();
void bind_kernel_arguments(pybind11::module_& module);
void bind_absmax(pybind11::module_& module);
void bind_accumulate(pybind11::module_& module);
void bind_chunks(pybind11::module_& module);
void bind_entries(pybind11::module_& module);
void bind_flight_ring(pybind11::module_& module);
void bind_gradient_counts(pybind11::module_& module);
void bind_gradients(pybind11::module_& module);
void bind_hashes(pybind11::module_& module);
void bind_indices(pybind11::module_& module);
void bind_low_rank(pybind11::module_& module);
void bind_norms(pybind11::module_& module);
void bind_pack(pybind11::module_& module);
void bind_quantize(pybind11::module_& module);
void bind_reduce(pybind11::module_& module);
void bind_scatter_add(pybind11::module_& module);
void bind_signs(pybind11::module_& module);
void bind_sparsify(pybind11::module_& module);
void bind_step(pybind11::module_& module);
void bind_topk(pybind11::module_& module);
void bind_unpack(pybind11::module_& module);
void bind_transport(pybind11::module_& module);
void bind_group(pybind11::module_& module);
void bind_messages(pybind11::module_& module);       // after bind_group
void bind_shared_memory(pybind11::module_& module);  // likewise
void bind_tcp(pybind11::module_& module);            // likewise
void bind_hierarchical(pybind11::module_& module);   // after both
void bind_nccl(pybind11::module_& module);           // only in builds with CUDA
void bind_streams(pybind11::module_& module);        // likewise
void bind_build_info(pybind11::module_& module);

}  // namespace pycomm
