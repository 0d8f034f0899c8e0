#include "kernels/accumulate.h"

#include "bindings/accumulation_arguments.h"
#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

void accumulate_arrays(py::handle grads, const py::dict& terms, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    AccumulationArguments given(grads, terms);
    Arguments arguments;
    given.add_to(arguments);
    arguments.require_apart();
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::accumulate_workspace_bytes(given.job));
            cuda::accumulate(given.job, given.factor().on_gpu(), given.finite(), workspace, call.stream());
        },
        [&] { accumulate(given.job, given.factor().on_cpu(), given.finite(), num_threads); });
}

}  // namespace

void bind_accumulate(py::module_& module) {
    auto scratch = py::arg("scratch");
    auto num_threads = py::arg("num_threads");
    module.def("accumulate", &accumulate_arrays, py::arg("grads"), py::arg("terms"), scratch, num_threads);
}

}  // namespace pycomm
