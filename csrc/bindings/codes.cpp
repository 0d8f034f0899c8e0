#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"
#include "kernels/indices.h"
#include "kernels/quantize.h"
#include "kernels/signs.h"

namespace pycomm {
namespace {

IndexLayout layout_of(py::handle limit, int64_t count) {
    const int64_t range = as_integer(limit, "limit");
    if (range < 1 || range > INT32_MAX) {
        throw ArgumentError(format("limit is %lld, wanted 1 <= limit <= 2147483647", static_cast<long long>(range)));
    }
    if (count < 1) throw ArgumentError(format("there are %lld indices, wanted some", static_cast<long long>(count)));
    if (count > INT32_MAX) {
        throw ArgumentError(format("there are %lld indices, wanted at most 2147483647", static_cast<long long>(count)));
    }
    return {range, count};
}

void pack_indices_of(py::handle indices, py::handle limit, py::handle words) {
    Array places = as_array(indices, "indices", Access::kRead);
    require_same(places.buffer, "indices", Buffer{nullptr, places.buffer.count, DType::kI32}, "int32");
    require_aligned(places.buffer, "indices");
    const IndexLayout layout = layout_of(limit, places.buffer.count);
    const int64_t range = as_integer(limit, "limit");
    Arguments arguments;
    Array bits = as_exactly(words, "words", Access::kWrite, DType::kI32, layout.num_words(),
                            "int32, packed_words(limit, count) of them");
    arguments.reads(places, "indices");
    arguments.writes(bits, "words");
    arguments.require_apart();
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

void unpack_indices_of(py::handle words, py::handle limit, py::handle how_many, py::handle indices,
                       py::handle scratch) {
    Scratch* const memory = scratch_of(scratch);
    const int64_t count = as_integer(how_many, "count");
    const IndexLayout layout = layout_of(limit, count);
    const int64_t range = as_integer(limit, "limit");
    Arguments arguments;
    Array bits = as_exactly(words, "words", Access::kRead, DType::kI32, layout.num_words(),
                            "int32, packed_words(limit, count) of them");
    Array places = as_exactly(indices, "indices", Access::kWrite, DType::kI32, count, "int32, count of them");
    arguments.writes(places, "indices");
    arguments.reads(bits, "words");
    arguments.require_apart();
    auto from = static_cast<const uint32_t*>(bits.buffer.data);
    auto to = static_cast<int32_t*>(places.buffer.data);
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            cuda::Workspace& workspace = call.workspace(memory, cuda::unpack_indices_workspace_bytes(count, range));
            without_gil([&] { cuda::unpack_indices(from, count, range, to, workspace, call.stream()); });
            return call.finish();
        }
    }
    py::gil_scoped_release release;
    unpack_indices(from, count, range, to);
}

Quantization quantization_of(py::handle block_size, py::handle num_levels, py::handle num_bits, py::handle norm_name) {
    const int64_t block = as_integer(block_size, "block"), levels = as_integer(num_levels, "levels");
    const int64_t bits = as_integer(num_bits, "bits");
    const std::string norm = as_text(norm_name, "norm", "'max' or 'euclidean'");
    if (block < 64 || block % 64 != 0) {
        throw ArgumentError(format("block is %lld, wanted a positive multiple of 64", static_cast<long long>(block)));
    }
    if (bits != 2 && bits != 4 && bits != 8) {
        throw ArgumentError(format("bits is %lld, wanted 2, 4 or 8", static_cast<long long>(bits)));
    }
    const int most = (1 << (bits - 1)) - 1;
    if (levels < 1 || levels > most) {
        throw ArgumentError(format("levels is %lld, wanted 1 <= levels <= %d with %d bits",
                                   static_cast<long long>(levels), most, static_cast<int>(bits)));
    }
    if (norm != "max" && norm != "euclidean") {
        throw ArgumentError("norm is '" + norm + "', wanted 'max' or 'euclidean'");
    }
    return {block, static_cast<int>(levels), static_cast<int>(bits), norm == "max" ? Norm::kMax : Norm::kEuclidean};
}

// Something of x's size that is written, or nothing.
float* remainder_of(const py::object& object, const Array& x, Array& held, Arguments& arguments) {
    if (object.is_none()) return nullptr;
    held = as_array(object, "remainder", Access::kWrite);
    require_same(held.buffer, "remainder", x.buffer, "x");
    require_aligned(held.buffer, "remainder");
    arguments.writes(held, "remainder");
    arguments.may_be(held, x);
    return static_cast<float*>(held.buffer.data);
}

void quantize_array(py::handle x, py::handle block, py::handle levels, py::handle bits, py::handle norm,
                    py::object seed, py::handle units, py::handle codes, py::object remainder, int num_threads) {
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
    arguments.reads(source, "x");
    arguments.writes(scales, "units");
    arguments.writes(small, "codes");
    Array numbers, held;
    if (!seed.is_none()) {
        numbers = as_exactly(seed, "seed", Access::kRead, DType::kI64, 2, "two int64");
        arguments.reads(numbers, "seed");
    }
    float* left = remainder_of(remainder, source, held, arguments);
    arguments.require_apart();
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

void dequantize_arrays(py::handle units, py::handle codes, py::handle block, py::handle levels, py::handle bits,
                       py::handle norm, py::handle out, py::handle scale, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
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
    arguments.writes(target, "out");
    arguments.reads(scales, "units");
    arguments.reads(small, "codes");
    factor.add_to(arguments);
    arguments.require_apart();
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            cuda::Workspace& workspace = call.workspace(memory, cuda::dequantize_workspace_bytes(scales.size()));
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
    arguments.reads(source, "x");
    arguments.reads(size, "magnitude");
    arguments.writes(bits, "words");
    Array held;
    float* left = remainder_of(remainder, source, held, arguments);
    arguments.require_apart();
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
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            cuda::Workspace& workspace = call.workspace(memory, cuda::unpack_signs_workspace_bytes(bits.size()));
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
        "packed_words",
        [](py::handle limit, py::handle count) { return layout_of(limit, as_integer(count, "count")).num_words(); },
        py::arg("limit"), py::arg("count"));
    module.def("pack_indices", &pack_indices_of, py::arg("indices"), py::arg("limit"), py::arg("words"));
    module.def("unpack_indices", &unpack_indices_of, py::arg("words"), py::arg("limit"), py::arg("count"),
               py::arg("indices"), scratch);
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
