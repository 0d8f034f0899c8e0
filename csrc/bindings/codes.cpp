#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"
#include "kernels/indices.h"
#include "kernels/quantize.h"
#include "kernels/signs.h"

namespace pycomm {
namespace {

IndexLayout layout_of(int64_t range, int64_t count) {
    if (range < 1 || range > INT32_MAX) {
        throw ArgumentError(format("range is %lld, wanted 1 <= range <= 2147483647", static_cast<long long>(range)));
    }
    if (count < 1) throw ArgumentError(format("there are %lld indices, wanted some", static_cast<long long>(count)));
    return {range, count};
}

void pack_indices_of(py::handle indices, int64_t range, py::handle words) {
    Array places = as_array(indices, "indices", Access::kRead);
    require_same(places.buffer, "indices", Buffer{nullptr, places.buffer.count, DType::kI32}, "int32");
    require_aligned(places.buffer, "indices");
    const IndexLayout layout = layout_of(range, places.buffer.count);
    Arguments arguments;
    Array bits = as_exactly(words, "words", Access::kWrite, DType::kI32, layout.num_words(),
                            "int32, packed_words(range, count) of them");
    arguments.add(places, "indices");
    arguments.add(bits, "words");
    auto from = static_cast<const int32_t*>(places.buffer.data);
    auto to = static_cast<uint32_t*>(bits.buffer.data);
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            without_gil([&] { cuda::pack_indices(from, places.buffer.count, range, to, call.stream()); });
            return call.finish();
        }
    }
    py::gil_scoped_release release;
    pack_indices(from, places.buffer.count, range, to);
}

void unpack_indices_of(py::handle words, int64_t range, py::handle indices, Scratch* scratch) {
    Array places = as_array(indices, "indices", Access::kWrite);
    require_same(places.buffer, "indices", Buffer{nullptr, places.buffer.count, DType::kI32}, "int32");
    require_aligned(places.buffer, "indices");
    const int64_t count = places.buffer.count;
    const IndexLayout layout = layout_of(range, count);
    Arguments arguments;
    Array bits = as_exactly(words, "words", Access::kRead, DType::kI32, layout.num_words(),
                            "int32, packed_words(range, count) of them");
    arguments.add(places, "indices");
    arguments.add(bits, "words");
    auto from = static_cast<const uint32_t*>(bits.buffer.data);
    auto to = static_cast<int32_t*>(places.buffer.data);
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            cuda::Workspace& workspace = call.workspace(scratch, cuda::unpack_indices_workspace_bytes(count, range));
            without_gil([&] { cuda::unpack_indices(from, count, range, to, workspace, call.stream()); });
            return call.finish();
        }
    }
    py::gil_scoped_release release;
    unpack_indices(from, count, range, to);
}

Quantization quantization_of(int64_t block, int levels, int bits, const std::string& norm) {
    if (block < 64 || block % 64 != 0) {
        throw ArgumentError(format("block is %lld, wanted a positive multiple of 64", static_cast<long long>(block)));
    }
    if (bits != 2 && bits != 4 && bits != 8) throw ArgumentError(format("bits is %d, wanted 2, 4 or 8", bits));
    if (levels < 1 || levels >= 1 << (bits - 1)) {
        throw ArgumentError(
            format("levels is %d, wanted 1 <= levels <= %d with %d bits", levels, (1 << (bits - 1)) - 1, bits));
    }
    if (norm != "max" && norm != "euclidean") {
        throw ArgumentError("norm is '" + norm + "', wanted 'max' or 'euclidean'");
    }
    return {block, levels, bits, norm == "max" ? Norm::kMax : Norm::kEuclidean};
}

// Something of x's size that is written, or nothing.
float* remainder_of(const py::object& object, const Buffer& x, Array& held, Arguments& arguments) {
    if (object.is_none()) return nullptr;
    held = as_array(object, "remainder", Access::kWrite);
    require_same(held.buffer, "remainder", x, "x");
    require_aligned(held.buffer, "remainder");
    arguments.add(held, "remainder");
    return static_cast<float*>(held.buffer.data);
}

void quantize_array(py::handle x, int64_t block, int levels, int bits, const std::string& norm, py::object seed,
                    py::handle units, py::handle codes, py::object remainder, int num_threads) {
    const Quantization how = quantization_of(block, levels, bits, norm);
    Array source = as_array(x, "x", Access::kRead);
    const int64_t count = source.buffer.count;
    Arguments arguments;
    require_same(source.buffer, "x", Buffer{nullptr, count, DType::kF32}, "wanted by quantize");
    require_aligned(source.buffer, "x");
    Array scales =
        as_exactly(units, "units", Access::kWrite, DType::kF32, num_blocks(how, count), "one float32 per block");
    Array small = as_exactly(codes, "codes", Access::kWrite, DType::kU8, code_bytes(how, count),
                             "uint8, bits * len(x) / 8 of them");
    arguments.add(source, "x");
    arguments.add(scales, "units");
    arguments.add(small, "codes");
    Array numbers, held;
    if (!seed.is_none()) {
        numbers = as_exactly(seed, "seed", Access::kRead, DType::kI64, 2, "two int64");
        arguments.add(numbers, "seed");
    }
    float* left = remainder_of(remainder, source.buffer, held, arguments);
    auto random = static_cast<const int64_t*>(numbers.buffer.data);
    auto to_units = static_cast<float*>(scales.buffer.data);
    auto to_codes = static_cast<uint8_t*>(small.buffer.data);
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            without_gil([&] { cuda::quantize(source.buffer, how, random, to_units, to_codes, left, call.stream()); });
            return call.finish();
        }
    }
    py::gil_scoped_release release;
    quantize(source.buffer, how, random, to_units, to_codes, left, num_threads);
}

// Pointers to the elements of arrays that must all look alike.
template <class T>
std::vector<const T*> pointers_of(const std::vector<Array>& arrays, const std::string& name, DType dtype, int64_t count,
                                  const char* of_what) {
    std::vector<const T*> pointers;
    for (size_t p = 0; p < arrays.size(); ++p) {
        std::string each = name + "[" + std::to_string(p) + "]";
        require_same(arrays[p].buffer, each, Buffer{nullptr, arrays[p].buffer.count, dtype}, of_what);
        require_count(arrays[p].buffer.count, count, each, of_what);
        require_aligned(arrays[p].buffer, each);
        pointers.push_back(static_cast<const T*>(arrays[p].buffer.data));
    }
    return pointers;
}

Array as_floats(py::handle object, const char* name, Access access) {
    Array array = as_array(object, name, access);
    require_same(array.buffer, name, Buffer{nullptr, array.buffer.count, DType::kF32}, "wanted here");
    require_aligned(array.buffer, name);
    return array;
}

void dequantize_arrays(py::handle units, py::handle codes, int64_t block, int levels, int bits, const std::string& norm,
                       py::handle out, py::handle scale, Scratch* scratch, int num_threads) {
    const Quantization how = quantization_of(block, levels, bits, norm);
    Array target = as_floats(out, "out", Access::kWrite);
    std::vector<Array> scales = as_arrays(units, "units", Access::kRead);
    std::vector<Array> small = as_arrays(codes, "codes", Access::kRead);
    const int64_t count = target.buffer.count;
    auto from_units = pointers_of<float>(scales, "units", DType::kF32, num_blocks(how, count), "one float32 per block");
    auto from_codes =
        pointers_of<uint8_t>(small, "codes", DType::kU8, code_bytes(how, count), "uint8, bits * len(out) / 8 of them");
    require_count(static_cast<int64_t>(small.size()), static_cast<int64_t>(scales.size()), "codes", "as units");
    Factor factor(scale);
    Arguments arguments;
    arguments.add(target, "out");
    arguments.add(scales, "units");
    arguments.add(small, "codes");
    factor.add_to(arguments);
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            cuda::Workspace& workspace = call.workspace(scratch, cuda::dequantize_workspace_bytes(scales.size()));
            without_gil([&] {
                cuda::dequantize(from_units, from_codes, how, target.buffer, factor.scale, workspace, call.stream());
            });
            return call.finish();
        }
    }
    require_number(factor);
    py::gil_scoped_release release;
    dequantize(from_units, from_codes, how, target.buffer, factor.scale.value, num_threads);
}

int64_t sign_words(int64_t count) { return (count + 31) / 32; }

void pack_signs_of(py::handle x, py::handle magnitude, py::handle words, py::object remainder, int num_threads) {
    Array source = as_floats(x, "x", Access::kRead);
    Arguments arguments;
    Array size = as_exactly(magnitude, "magnitude", Access::kRead, DType::kF32, 1, "one float32");
    Array bits = as_exactly(words, "words", Access::kWrite, DType::kI32, sign_words(source.buffer.count),
                            "int32, a bit per element of x");
    arguments.add(source, "x");
    arguments.add(size, "magnitude");
    arguments.add(bits, "words");
    Array held;
    float* left = remainder_of(remainder, source.buffer, held, arguments);
    auto all = static_cast<const float*>(size.buffer.data);
    auto to = static_cast<uint32_t*>(bits.buffer.data);
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            without_gil([&] { cuda::pack_signs(source.buffer, all, to, left, call.stream()); });
            return call.finish();
        }
    }
    py::gil_scoped_release release;
    pack_signs(source.buffer, all, to, left, num_threads);
}

void unpack_signs_of(py::handle words, py::handle magnitudes, py::handle out, py::handle scale, Scratch* scratch,
                     int num_threads) {
    Array target = as_floats(out, "out", Access::kWrite);
    std::vector<Array> bits = as_arrays(words, "words", Access::kRead);
    std::vector<Array> sizes = as_arrays(magnitudes, "magnitudes", Access::kRead);
    auto from = pointers_of<uint32_t>(bits, "words", DType::kI32, sign_words(target.buffer.count),
                                      "int32, a bit per element of out");
    auto of_each = pointers_of<float>(sizes, "magnitudes", DType::kF32, 1, "one float32");
    require_count(static_cast<int64_t>(sizes.size()), static_cast<int64_t>(bits.size()), "magnitudes", "as words");
    Factor factor(scale);
    Arguments arguments;
    arguments.add(target, "out");
    arguments.add(bits, "words");
    arguments.add(sizes, "magnitudes");
    factor.add_to(arguments);
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            cuda::Workspace& workspace = call.workspace(scratch, cuda::unpack_signs_workspace_bytes(bits.size()));
            without_gil(
                [&] { cuda::unpack_signs(from, of_each, target.buffer, factor.scale, workspace, call.stream()); });
            return call.finish();
        }
    }
    require_number(factor);
    py::gil_scoped_release release;
    unpack_signs(from, of_each, target.buffer, factor.scale.value, num_threads);
}

}  // namespace

void bind_codes(py::module_& module) {
    auto scratch = py::arg("scratch");
    auto num_threads = py::arg("num_threads");
    module.def(
        "packed_words", [](int64_t range, int64_t count) { return layout_of(range, count).num_words(); },
        py::arg("range"), py::arg("count"));
    module.def("pack_indices", &pack_indices_of, py::arg("indices"), py::arg("range"), py::arg("words"));
    module.def("unpack_indices", &unpack_indices_of, py::arg("words"), py::arg("range"), py::arg("indices"), scratch);
    module.def("quantize", &quantize_array, py::arg("x"), py::arg("block"), py::arg("levels"), py::arg("bits"),
               py::arg("norm"), py::arg("seed"), py::arg("units"), py::arg("codes"), py::arg("remainder"), num_threads);
    module.def("dequantize", &dequantize_arrays, py::arg("units"), py::arg("codes"), py::arg("block"),
               py::arg("levels"), py::arg("bits"), py::arg("norm"), py::arg("out"), py::arg("scale"), scratch,
               num_threads);
    module.def("pack_signs", &pack_signs_of, py::arg("x"), py::arg("magnitude"), py::arg("words"), py::arg("remainder"),
               num_threads);
    module.def("unpack_signs", &unpack_signs_of, py::arg("words"), py::arg("magnitudes"), py::arg("out"),
               py::arg("scale"), scratch, num_threads);
}

}  // namespace pycomm
