#include "kernels/topk.h"

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

int64_t checked_k(py::handle k, int64_t count) {
    const int64_t wanted = as_integer(k, "k");
    if (count > INT32_MAX) {
        throw ArgumentError(
            format("x has %lld elements, wanted at most 2147483647: indices are int32", static_cast<long long>(count)));
    }
    if (wanted < 1 || wanted > count) {
        throw ArgumentError(format("k is %lld, wanted 1 <= k <= %lld, the number of elements of x",
                                   static_cast<long long>(wanted), static_cast<long long>(count)));
    }
    return wanted;
}

void topk_array(py::handle x, py::handle how_many, py::handle values, py::handle indices, py::object threshold,
                py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    Array source = as_array(x, "x", Access::kRead);
    Array top = as_array(values, "values", Access::kWrite);
    Array places = as_array(indices, "indices", Access::kWrite);
    require_floating(source.buffer, "x");
    const int64_t k = checked_k(how_many, source.buffer.count);
    require_same(top.buffer, "values", Buffer{nullptr, k, source.buffer.dtype}, "x[:k]");
    require_same(places.buffer, "indices", Buffer{nullptr, k, DType::kI32}, "int32[k]");
    Array earlier;
    Arguments arguments;
    arguments.reads(source, "x");
    arguments.writes(top, "values");
    arguments.writes(places, "indices");
    if (!threshold.is_none()) {
        earlier = as_array(threshold, "threshold", Access::kWrite);
        require_same(earlier.buffer, "threshold", Buffer{nullptr, 1, DType::kF32}, "one float32");
        require_aligned(earlier.buffer, "threshold");
        arguments.writes(earlier, "threshold");
    }
    require_aligned(places.buffer, "indices");
    arguments.require_apart();
    auto to = static_cast<int32_t*>(places.buffer.data);
    auto magnitude = static_cast<float*>(earlier.buffer.data);
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::topk_workspace_bytes(source.buffer, k));
            cuda::topk(source.buffer, k, top.buffer, to, magnitude, workspace, call.stream());
        },
        [&] { topk(source.buffer, k, top.buffer, to, magnitude, num_threads); });
}

}  // namespace

void bind_topk(py::module_& module) {
    module.def("topk", &topk_array, py::arg("x"), py::arg("k"), py::arg("values"), py::arg("indices"),
               py::arg("threshold"), py::arg("scratch"), py::arg("num_threads"));
}

}  // namespace pycomm
