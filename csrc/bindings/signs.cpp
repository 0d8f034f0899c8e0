#include "kernels/signs.h"

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

int64_t sign_words(int64_t count) { return (count + 31) / 32; }

void pack_signs_of(py::handle x, py::handle magnitude, py::handle words, py::object remainder, int num_threads) {
    Array source = as_floats(x, "x", Access::kRead);
    Array size = as_exactly(magnitude, "magnitude", Access::kRead, DType::kF32, 1, "one float32");
    Array bits = as_exactly(words, "words", Access::kWrite, DType::kI32, sign_words(source.buffer.count),
                            "int32, a bit per element of x");
    Array rest = as_remainder(remainder, source);
    Arguments arguments;
    arguments.reads(source, "x");
    arguments.reads(size, "magnitude");
    arguments.writes(bits, "words");
    add_remainder(arguments, rest, source);
    arguments.require_apart();
    auto of_all = static_cast<const float*>(size.buffer.data);
    auto to = static_cast<uint32_t*>(bits.buffer.data);
    auto to_rest = static_cast<float*>(rest.buffer.data);
    dispatch(
        arguments, [&](auto& call) { cuda::pack_signs(source.buffer, of_all, to, to_rest, call.stream()); },
        [&] { pack_signs(source.buffer, of_all, to, to_rest, num_threads); });
}

void unpack_signs_of(py::handle words, py::handle magnitudes, py::handle out, py::handle scale, py::handle scratch,
                     int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    Array target = as_floats(out, "out", Access::kWrite);
    std::vector<Array> bits = as_arrays(words, "words", Access::kRead);
    std::vector<Array> sizes = as_arrays(magnitudes, "magnitudes", Access::kRead);
    auto from = pointers_of<uint32_t>(bits, "words", DType::kI32, sign_words(target.buffer.count),
                                      "int32, a bit per element of out");
    auto of_each = pointers_of<float>(sizes, "magnitudes", DType::kF32, 1, "one float32");
    require_count(static_cast<int64_t>(sizes.size()), static_cast<int64_t>(bits.size()), "magnitudes", "as words");
    Factor factor(scale);
    Arguments arguments;
    arguments.writes(target, "out");
    arguments.reads(bits, "words");
    arguments.reads(sizes, "magnitudes");
    factor.add_to(arguments);
    arguments.require_apart();
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::unpack_signs_workspace_bytes(from.size()));
            cuda::unpack_signs(from, of_each, target.buffer, factor.on_gpu(), workspace, call.stream());
        },
        [&] { unpack_signs(from, of_each, target.buffer, factor.on_cpu(), num_threads); });
}

}  // namespace

void bind_signs(py::module_& module) {
    auto num_threads = py::arg("num_threads");
    module.def("pack_signs", &pack_signs_of, py::arg("x"), py::arg("magnitude"), py::arg("words"), py::arg("remainder"),
               num_threads);
    module.def("unpack_signs", &unpack_signs_of, py::arg("words"), py::arg("magnitudes"), py::arg("out"),
               py::arg("scale"), py::arg("scratch"), num_threads);
}

}  // namespace pycomm
