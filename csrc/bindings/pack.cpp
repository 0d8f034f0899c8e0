#include "kernels/pack.h"

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

void pack_arrays(py::handle tensors, py::handle out, py::handle scale, py::handle limit, py::handle finite,
                 py::object unless, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    std::vector<Array> sources = as_arrays(tensors, "tensors", Access::kRead);
    Array target = as_array(out, "out", Access::kWrite);
    Array flag = as_answer(finite, "finite", 1);
    Array condition = unless.is_none() ? Array{} : as_answer(unless, "unless", 1, Access::kRead);
    Factor factor(scale);
    const double most = as_number(limit, "limit");
    std::vector<Buffer> buffers = buffers_of(sources);
    require_total(buffers, "tensors", target.buffer, "out");
    Arguments arguments;
    arguments.writes(target, "out");
    arguments.reads(sources, "tensors");
    arguments.writes(flag, "finite");
    if (!unless.is_none()) arguments.reads(condition, "unless");
    factor.add_to(arguments);
    excuse_in_place(arguments, sources, target);
    arguments.require_apart();
    auto answer = static_cast<bool*>(flag.buffer.data);
    auto skip = static_cast<const bool*>(condition.buffer.data);
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::pack_workspace_bytes(buffers.size()));
            cuda::pack(buffers, target.buffer, factor.on_gpu(), most, answer, skip, workspace, call.stream());
        },
        [&] {
            const double by = factor.on_cpu();
            *answer = (skip != nullptr && *skip) || pack(buffers, target.buffer, by, most, num_threads);
        });
}

}  // namespace

void bind_pack(py::module_& module) {
    module.def("pack", &pack_arrays, py::arg("tensors"), py::arg("out"), py::arg("scale"), py::arg("limit"),
               py::arg("finite"), py::arg("unless"), py::arg("scratch"), py::arg("num_threads"));
}

}  // namespace pycomm
