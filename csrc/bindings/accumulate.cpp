#include "kernels/accumulate.h"

#include "bindings/accumulation_arguments.h"
#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

void accumulate_arrays(py::handle grads, py::object weights, const py::object& clip, py::handle acc,
                       py::object residual, py::object velocity, py::object old_velocity, py::handle finite,
                       py::handle scale, py::handle decay, py::handle momentum, py::handle nesterov, py::handle scratch,
                       int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    AccumulationArguments given(grads, weights, clip, acc, residual, velocity, old_velocity, finite, scale, decay,
                                momentum, nesterov);
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
    module.def("accumulate", &accumulate_arrays, py::arg("grads"), py::arg("weights"), py::arg("clip"), py::arg("acc"),
               py::arg("residual"), py::arg("velocity"), py::arg("old_velocity"), py::arg("finite"), py::arg("scale"),
               py::arg("decay"), py::arg("momentum"), py::arg("nesterov"), scratch, num_threads);
}

}  // namespace pycomm
