#include "kernels/hashes.h"

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

void hashes_arrays(py::handle tensors, py::handle out, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    std::vector<Array> sources = as_arrays(tensors, "tensors", Access::kRead);
    Array target = as_exactly(out, "out", Access::kWrite, DType::kI64, static_cast<int64_t>(sources.size()),
                              "one int64 for each of tensors");
    std::vector<Buffer> buffers = buffers_of(sources);
    Arguments arguments;
    arguments.writes(target, "out");
    arguments.reads(sources, "tensors");
    arguments.require_apart();
    auto answer = static_cast<uint64_t*>(target.buffer.data);
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::hashes_workspace_bytes(buffers));
            cuda::hashes(buffers, answer, workspace, call.stream());
        },
        [&] { hashes(buffers, answer, num_threads); });
}

}  // namespace

void bind_hashes(py::module_& module) {
    module.def("hashes", &hashes_arrays, py::arg("tensors"), py::arg("out"), py::arg("scratch"),
               py::arg("num_threads"));
}

}  // namespace pycomm
