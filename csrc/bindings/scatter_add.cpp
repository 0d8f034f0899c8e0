#include "kernels/scatter_add.h"

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

void scatter_add_arrays(py::handle out, py::handle indices, py::handle values, py::handle scale, py::handle scratch) {
    Scratch* const memory = scratch_of(scratch);
    Array target = as_array(out, "out", Access::kWrite);
    Array places = as_array(indices, "indices", Access::kRead);
    Array terms = as_array(values, "values", Access::kRead);
    Factor factor(scale);
    require_floating(target.buffer, "out");
    require_floating(terms.buffer, "values");
    require_same(places.buffer, "indices", Buffer{nullptr, terms.buffer.count, DType::kI32}, "int32[len(values)]");
    require_aligned(places.buffer, "indices");
    Arguments arguments;
    arguments.writes(target, "out");
    arguments.reads(places, "indices");
    arguments.reads(terms, "values");
    factor.add_to(arguments);
    arguments.require_apart();
    auto where = static_cast<const int32_t*>(places.buffer.data);
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::scatter_add_workspace_bytes());
            cuda::scatter_add(target.buffer, where, terms.buffer, factor.on_gpu(), workspace, call.stream());
        },
        [&] { scatter_add(target.buffer, where, terms.buffer, factor.on_cpu()); });
}

}  // namespace

void bind_scatter_add(py::module_& module) {
    module.def("scatter_add", &scatter_add_arrays, py::arg("out"), py::arg("indices"), py::arg("values"),
               py::arg("scale"), py::arg("scratch"));
}

}  // namespace pycomm
