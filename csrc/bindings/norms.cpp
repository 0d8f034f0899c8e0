#include "kernels/norms.h"

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

void norms_arrays(py::handle tensors, py::handle squares, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    std::vector<Array> sources = as_arrays(tensors, "tensors", Access::kRead);
    Array target = as_exactly(squares, "squares", Access::kWrite, DType::kF64, static_cast<int64_t>(sources.size()),
                              "one float64 for each of tensors");
    std::vector<Buffer> buffers = buffers_of(sources);
    for (size_t j = 0; j < buffers.size(); ++j) {
        require_floating(buffers[j], name_of_item("tensors", j));
        require_aligned(buffers[j], name_of_item("tensors", j));
    }
    Arguments arguments;
    arguments.writes(target, "squares");
    arguments.reads(sources, "tensors");
    arguments.require_apart();
    auto answer = static_cast<double*>(target.buffer.data);
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::norms_workspace_bytes(buffers));
            cuda::norms(buffers, answer, workspace, call.stream());
        },
        [&] { norms(buffers, answer, num_threads); });
}

}  // namespace

void bind_norms(py::module_& module) {
    module.def("norms", &norms_arrays, py::arg("tensors"), py::arg("squares"), py::arg("scratch"),
               py::arg("num_threads"));
}

}  // namespace pycomm
