#include "kernels/indices.h"

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

IndexLayout layout_of(py::handle limit, int64_t count) {
    const int64_t range = as_integer(limit, "limit");
    if (range < 1 || range > INT32_MAX) {
        throw ArgumentError(format("limit is %lld, wanted 1 <= limit <= 2147483647", static_cast<long long>(range)));
    }
    if (count < 1)
        throw ArgumentError(format("there are %lld indices, wanted at least one", static_cast<long long>(count)));
    if (count > INT32_MAX) {
        throw ArgumentError(format("there are %lld indices, wanted at most 2147483647", static_cast<long long>(count)));
    }
    return {range, count};
}

void pack_indices_of(py::handle indices, py::handle limit, py::handle words) {
    Array places = as_array(indices, "indices", Access::kRead);
    require_same(places.buffer, "indices", Buffer{nullptr, places.buffer.count, DType::kI32}, "int32");
    require_aligned(places.buffer, "indices");
    const int64_t count = places.buffer.count, num_words = layout_of(limit, count).num_words();
    const int64_t range = as_integer(limit, "limit");
    Array bits =
        as_exactly(words, "words", Access::kWrite, DType::kI32, num_words, "int32, packed_words(limit, count) of them");
    Arguments arguments;
    arguments.reads(places, "indices");
    arguments.writes(bits, "words");
    arguments.require_apart();
    auto from = static_cast<const int32_t*>(places.buffer.data);
    auto to = static_cast<uint32_t*>(bits.buffer.data);
    dispatch(
        arguments, [&](auto& call) { cuda::pack_indices(from, count, range, to, call.stream()); },
        [&] { pack_indices(from, count, range, to); });
}

void unpack_indices_of(py::handle words, py::handle limit, py::handle how_many, py::handle indices,
                       py::handle scratch) {
    Scratch* const memory = scratch_of(scratch);
    const int64_t count = as_integer(how_many, "count"), num_words = layout_of(limit, count).num_words();
    const int64_t range = as_integer(limit, "limit");
    Array bits =
        as_exactly(words, "words", Access::kRead, DType::kI32, num_words, "int32, packed_words(limit, count) of them");
    Array places = as_exactly(indices, "indices", Access::kWrite, DType::kI32, count, "int32, count of them");
    Arguments arguments;
    arguments.writes(places, "indices");
    arguments.reads(bits, "words");
    arguments.require_apart();
    auto from = static_cast<const uint32_t*>(bits.buffer.data);
    auto to = static_cast<int32_t*>(places.buffer.data);
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::unpack_indices_workspace_bytes(count, range));
            cuda::unpack_indices(from, count, range, to, workspace, call.stream());
        },
        [&] { unpack_indices(from, count, range, to); });
}

}  // namespace

void bind_indices(py::module_& module) {
    module.def(
        "packed_words",
        [](py::handle limit, py::handle count) { return layout_of(limit, as_integer(count, "count")).num_words(); },
        py::arg("limit"), py::arg("count"));
    module.def("pack_indices", &pack_indices_of, py::arg("indices"), py::arg("limit"), py::arg("words"));
    module.def("unpack_indices", &unpack_indices_of, py::arg("words"), py::arg("limit"), py::arg("count"),
               py::arg("indices"), py::arg("scratch"));
}

}  // namespace pycomm
