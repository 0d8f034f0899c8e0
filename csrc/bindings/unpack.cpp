#include "kernels/unpack.h"

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

void unpack_array(py::handle flat, py::handle tensors, py::handle scale, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    Array source = as_array(flat, "flat", Access::kRead);
    std::vector<Array> targets = as_arrays(tensors, "tensors", Access::kWrite);
    Factor factor(scale);
    std::vector<Buffer> buffers = buffers_of(targets);
    require_total(buffers, "tensors", source.buffer, "flat");
    Arguments arguments;
    arguments.reads(source, "flat");
    arguments.writes(targets, "tensors");
    factor.add_to(arguments);
    excuse_in_place(arguments, targets, source);
    arguments.require_apart();
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::unpack_workspace_bytes(buffers.size()));
            cuda::unpack(source.buffer, buffers, factor.on_gpu(), workspace, call.stream());
        },
        [&] { unpack(source.buffer, buffers, factor.on_cpu(), num_threads); });
}

}  // namespace

void bind_unpack(py::module_& module) {
    module.def("unpack", &unpack_array, py::arg("flat"), py::arg("tensors"), py::arg("scale"), py::arg("scratch"),
               py::arg("num_threads"));
}

}  // namespace pycomm
