#include "kernels/reduce.h"

#include "bindings/bindings.h"
#include "bindings/collectives.h"
#include "bindings/kernel_arguments.h"
#include "bindings/reduce_op.h"

namespace pycomm {
namespace {

void reduce_arrays(py::handle out, py::handle inputs, py::handle op_name, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    Array target = as_array(out, "out", Access::kWrite);
    std::vector<Array> sources = as_arrays(inputs, "inputs", Access::kRead);
    std::vector<Buffer> buffers = buffers_of(sources);
    for (size_t i = 0; i < buffers.size(); ++i) {
        require_same(buffers[i], name_of_item("inputs", i), target.buffer, "out");
    }
    ReduceOp op = reduce_op_named(op_name);
    require_reducible(target.buffer, op, "out");
    Arguments arguments;
    arguments.writes(target, "out");
    arguments.reads(sources, "inputs");
    for (const Array& source : sources) arguments.may_be(target, source);
    arguments.require_apart();
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::reduce_workspace_bytes(buffers.size()));
            cuda::reduce(target.buffer, buffers, op, workspace, call.stream());
        },
        [&] { reduce(target.buffer, buffers, op, num_threads); });
}

}  // namespace

void bind_reduce(py::module_& module) {
    module.def("reduce", &reduce_arrays, py::arg("out"), py::arg("inputs"), py::arg("op"), py::arg("scratch"),
               py::arg("num_threads"));
}

}  // namespace pycomm
