#include "kernels/absmax.h"

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

void absmax_arrays(py::handle tensors, py::handle out, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    std::vector<Array> sources = as_arrays(tensors, "tensors", Access::kRead);
    Array target = as_answer(out, "out", sizeof(float));
    std::vector<Buffer> buffers = buffers_of(sources);
    require_all_floating(buffers, "tensors");
    Arguments arguments;
    arguments.writes(target, "out");
    arguments.reads(sources, "tensors");
    arguments.require_apart();
    auto answer = static_cast<float*>(target.buffer.data);
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::absmax_workspace_bytes(buffers.size()));
            cuda::absmax(buffers, answer, workspace, call.stream());
        },
        [&] { *answer = absmax(buffers, num_threads); });
}

}  // namespace

void bind_absmax(py::module_& module) {
    module.def("absmax", &absmax_arrays, py::arg("tensors"), py::arg("out"), py::arg("scratch"),
               py::arg("num_threads"));
}

}  // namespace pycomm
