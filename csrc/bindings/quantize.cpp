#include "kernels/quantize.h"

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

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

void quantize_array(py::handle x, py::handle block, py::handle levels, py::handle bits, py::handle norm,
                    py::object seed, py::handle scales, py::handle codes, py::object remainder, int num_threads) {
    const Quantization config = quantization_of(block, levels, bits, norm);
    Array source = as_floats(x, "x", Access::kRead, "required by quantize");
    const int64_t count = source.buffer.count;
    Array scale_of_each =
        as_exactly(scales, "scales", Access::kWrite, DType::kF32, num_blocks(config, count), "one float32 per block");
    Array code_of_each = as_exactly(codes, "codes", Access::kWrite, DType::kU8, code_bytes(config, count),
                                    "uint8, bits * len(x) / 8 of them");
    Array numbers = seed.is_none() ? Array{} : as_exactly(seed, "seed", Access::kRead, DType::kI64, 2, "two int64");
    Array rest = as_remainder(remainder, source);
    Arguments arguments;
    arguments.reads(source, "x");
    arguments.writes(scale_of_each, "scales");
    arguments.writes(code_of_each, "codes");
    arguments.reads(numbers, "seed");
    add_remainder(arguments, rest, source);
    arguments.require_apart();
    auto random = static_cast<const int64_t*>(numbers.buffer.data);
    auto to_scales = static_cast<float*>(scale_of_each.buffer.data);
    auto to_codes = static_cast<uint8_t*>(code_of_each.buffer.data);
    auto to_rest = static_cast<float*>(rest.buffer.data);
    dispatch(
        arguments,
        [&](auto& call) { cuda::quantize(source.buffer, config, random, to_scales, to_codes, to_rest, call.stream()); },
        [&] { quantize(source.buffer, config, random, to_scales, to_codes, to_rest, num_threads); });
}

void dequantize_arrays(py::handle scales, py::handle codes, py::handle block, py::handle levels, py::handle bits,
                       py::handle norm, py::handle out, py::handle scale, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    const Quantization config = quantization_of(block, levels, bits, norm);
    Array target = as_floats(out, "out", Access::kWrite);
    std::vector<Array> all_scales = as_arrays(scales, "scales", Access::kRead);
    std::vector<Array> all_codes = as_arrays(codes, "codes", Access::kRead);
    const int64_t count = target.buffer.count;
    auto from_scales =
        pointers_of<float>(all_scales, "scales", DType::kF32, num_blocks(config, count), "one float32 per block");
    auto from_codes = pointers_of<uint8_t>(all_codes, "codes", DType::kU8, code_bytes(config, count),
                                           "uint8, bits * len(out) / 8 of them");
    require_count(static_cast<int64_t>(all_codes.size()), static_cast<int64_t>(all_scales.size()), "codes",
                  "as scales");
    Factor factor(scale);
    Arguments arguments;
    arguments.writes(target, "out");
    arguments.reads(all_scales, "scales");
    arguments.reads(all_codes, "codes");
    factor.add_to(arguments);
    arguments.require_apart();
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::dequantize_workspace_bytes(from_codes.size()));
            cuda::dequantize(from_scales, from_codes, config, target.buffer, factor.on_gpu(), workspace, call.stream());
        },
        [&] { dequantize(from_scales, from_codes, config, target.buffer, factor.on_cpu(), num_threads); });
}

}  // namespace

void bind_quantize(py::module_& module) {
    auto num_threads = py::arg("num_threads");
    module.def("quantize", &quantize_array, py::arg("x"), py::arg("block"), py::arg("levels"), py::arg("bits"),
               py::arg("norm"), py::arg("seed"), py::arg("scales"), py::arg("codes"), py::arg("remainder"),
               num_threads);
    module.def("dequantize", &dequantize_arrays, py::arg("scales"), py::arg("codes"), py::arg("block"),
               py::arg("levels"), py::arg("bits"), py::arg("norm"), py::arg("out"), py::arg("scale"),
               py::arg("scratch"), num_threads);
}

}  // namespace pycomm
