#include "kernels/quantize.h"

#include <array>

#include "bindings/accumulation_arguments.h"
#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

CodeType element_named(const std::string& name) {
    if (name == "int") return CodeType::kInt;
    if (name == "e4m3") return CodeType::kE4M3;
    if (name == "e5m2") return CodeType::kE5M2;
    throw ArgumentError("element is '" + name + "', wanted 'int', 'e4m3' or 'e5m2'");
}

// Of the attributes of a pycomm.kernels.Quantization.
Quantization quantization_of(py::handle config) {
    const int64_t block = as_integer(config.attr("block"), "block");
    const int64_t levels = as_integer(config.attr("levels"), "levels");
    const int64_t bits = as_integer(config.attr("bits"), "bits");
    const std::string norm = as_text(config.attr("norm"), "norm", "'max' or 'euclidean'");
    const std::string name = as_text(config.attr("element"), "element", "'int', 'e4m3' or 'e5m2'");
    const CodeType element = element_named(name);
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
    if (element != CodeType::kInt && (bits != 8 || levels != Quantization{}.levels || norm != "max")) {
        throw ArgumentError(format("bits is %d, levels is %d and norm is '%s' with element '%s', wanted their defaults",
                                   static_cast<int>(bits), static_cast<int>(levels), norm.c_str(), name.c_str()));
    }
    return {block, static_cast<int>(levels), static_cast<int>(bits), norm == "max" ? Norm::kMax : Norm::kEuclidean,
            element};
}

// Arrays that quantize and requantize share; each as the kernels expect it.
class Coding {
   public:
    Coding(const Quantization& config, int64_t count, py::handle to_scales, py::handle to_codes,
           const py::object& numbers, const std::array<const char*, 2>& names = {"scales", "codes"})
        : names_(names),
          scales_(as_exactly(to_scales, names[0], Access::kWrite, DType::kF32, num_blocks(config, count),
                             "one float32 per block")),
          codes_(as_exactly(to_codes, names[1], Access::kWrite, DType::kU8, code_bytes(config, count),
                            "uint8, bits / 8 of them per element")),
          seed_(numbers.is_none() ? Array{} : as_exactly(numbers, "seed", Access::kRead, DType::kI64, 2, "two int64")) {
    }

    void add_to(Arguments& arguments) const {
        arguments.writes(scales_, names_[0]);
        arguments.writes(codes_, names_[1]);
        arguments.reads(seed_, "seed");
    }
    const int64_t* random() const { return static_cast<const int64_t*>(seed_.buffer.data); }
    float* to_scales() const { return static_cast<float*>(scales_.buffer.data); }
    uint8_t* to_codes() const { return static_cast<uint8_t*>(codes_.buffer.data); }

   private:
    std::array<const char*, 2> names_;
    Array scales_, codes_, seed_;
};

void quantize_array(py::handle x, py::handle settings, py::object seed, py::handle scales, py::handle codes,
                    py::object remainder, int num_threads) {
    const Quantization config = quantization_of(settings);
    Array source = as_floats(x, "x", Access::kRead, "required by quantize");
    const Coding coding(config, source.buffer.count, scales, codes, seed);
    Array rest = as_remainder(remainder, source);
    Arguments arguments;
    arguments.reads(source, "x");
    coding.add_to(arguments);
    add_remainder(arguments, rest, source);
    arguments.require_apart();
    auto to_rest = static_cast<float*>(rest.buffer.data);
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::quantize(source.buffer, config, coding.random(), coding.to_scales(), coding.to_codes(), to_rest,
                           call.stream());
        },
        [&] {
            quantize(source.buffer, config, coding.random(), coding.to_scales(), coding.to_codes(), to_rest,
                     num_threads);
        });
}

// Parts of acc to be quantized, in order: tuples of begin, end, seed or None, scales and codes.
struct CodedParts {
    std::vector<QuantizedPart> all;
    std::vector<Coding> codings;

    CodedParts(const Quantization& config, const Buffer& acc, py::handle parts) {
        int64_t last = 0;
        for (py::handle item : parts) {
            const std::string name = name_of_item("parts", all.size());
            if (!py::isinstance<py::tuple>(item) || py::len(item) != 5) {
                throw ArgumentTypeError(name + " is " + shown(item) + ", wanted begin, end, seed, scales and codes");
            }
            auto part = py::reinterpret_borrow<py::tuple>(item);
            const int64_t begin = as_integer(part[0], name + "[0]"), end = as_integer(part[1], name + "[1]");
            if (begin == end) continue;
            if (begin < last || end < begin || end > acc.count) {
                throw ArgumentError(format("%s is from %lld to %lld, wanted elements of acc, after the parts before it",
                                           name.c_str(), static_cast<long long>(begin), static_cast<long long>(end)));
            }
            last = end;
            codings.emplace_back(config, end - begin, part[3], part[4], part[2]);
            const Coding& coding = codings.back();
            all.push_back({begin, end - begin, coding.random(), coding.to_scales(), coding.to_codes()});
        }
    }
};

void accumulate_quantized_arrays(py::handle grads, const py::dict& terms, py::handle settings, py::handle parts,
                                 py::handle keeps, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    const Quantization config = quantization_of(settings);
    AccumulationArguments given(grads, terms);
    const Buffer& sums = given.job.acc;
    require_same(sums, "acc", Buffer{nullptr, sums.count, DType::kF32}, "required by quantize");
    const CodedParts coded(config, sums, parts);
    const bool keeps_rest = as_flag(keeps, "keeps");
    Arguments arguments;
    given.add_to(arguments);
    for (const Coding& coding : coded.codings) coding.add_to(arguments);
    arguments.require_apart();
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::accumulate_workspace_bytes(given.job));
            cuda::accumulate(given.job, given.factor().on_gpu(), given.finite(), workspace, call.stream());
            for (const QuantizedPart& part : coded.all) {
                const Buffer x{static_cast<float*>(sums.data) + part.begin, part.count, DType::kF32, sums.device};
                cuda::quantize(x, config, part.seed, part.scales, part.codes, static_cast<float*>(x.data),
                               call.stream());
            }
        },
        [&] {
            accumulate_quantized(given.job, given.factor().on_cpu(), given.finite(), config, coded.all, keeps_rest,
                                 num_threads);
        });
}

// What several ranks sent, as the kernels expect it.
struct Contributions {
    std::vector<Array> scales, codes;
    std::vector<const float*> from_scales;
    std::vector<const uint8_t*> from_codes;

    Contributions(const Quantization& config, int64_t count, py::handle all_scales, py::handle all_codes)
        : scales(as_arrays(all_scales, "scales", Access::kRead)),
          codes(as_arrays(all_codes, "codes", Access::kRead)),
          from_scales(
              pointers_of<float>(scales, "scales", DType::kF32, num_blocks(config, count), "one float32 per block")),
          from_codes(pointers_of<uint8_t>(codes, "codes", DType::kU8, code_bytes(config, count),
                                          "uint8, bits / 8 of them per element")) {
        require_count(static_cast<int64_t>(codes.size()), static_cast<int64_t>(scales.size()), "codes", "as scales");
    }

    void add_to(Arguments& arguments) const {
        arguments.reads(scales, "scales");
        arguments.reads(codes, "codes");
    }
};

void dequantize_arrays(py::handle scales, py::handle codes, py::handle settings, py::handle out, py::handle scale,
                       py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    const Quantization config = quantization_of(settings);
    Array target = as_floats(out, "out", Access::kWrite);
    const Contributions from(config, target.buffer.count, scales, codes);
    Factor factor(scale);
    Arguments arguments;
    arguments.writes(target, "out");
    from.add_to(arguments);
    factor.add_to(arguments);
    arguments.require_apart();
    dispatch(
        arguments,
        [&](auto& call) {
            auto& workspace = call.workspace(memory, cuda::dequantize_workspace_bytes(from.from_codes.size()));
            cuda::dequantize(from.from_scales, from.from_codes, config, target.buffer, factor.on_gpu(), workspace,
                             call.stream());
        },
        [&] { dequantize(from.from_scales, from.from_codes, config, target.buffer, factor.on_cpu(), num_threads); });
}

void requantize_arrays(py::handle scales, py::handle codes, py::handle num_elements, py::handle settings,
                       py::object seed, py::handle out_scales, py::handle out_codes, py::object remainder,
                       py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    const Quantization config = quantization_of(settings);
    const int64_t count = as_integer(num_elements, "count");
    if (count < 0) throw ArgumentError("count is " + shown(num_elements) + ", wanted at least 0");
    const Contributions from(config, count, scales, codes);
    const Coding coding(config, count, out_scales, out_codes, seed, {"out[0]", "out[1]"});
    const Array rest = remainder.is_none() ? Array{}
                                           : as_exactly(remainder, "remainder", Access::kWrite, DType::kF32, count,
                                                        "float32, `count` of them");
    Arguments arguments;
    from.add_to(arguments);
    coding.add_to(arguments);
    arguments.writes(rest, "remainder");
    arguments.require_apart();
    const Requantized out{coding.to_scales(), coding.to_codes(), static_cast<float*>(rest.buffer.data)};
    dispatch(
        arguments,
        [&](auto& call) {
            auto& workspace = call.workspace(memory, cuda::dequantize_workspace_bytes(from.from_codes.size()));
            cuda::requantize(from.from_scales, from.from_codes, count, config, coding.random(), out, workspace,
                             call.stream());
        },
        [&] { requantize(from.from_scales, from.from_codes, count, config, coding.random(), out, num_threads); });
}

}  // namespace

void bind_quantize(py::module_& module) {
    auto config = py::arg("config"), seed = py::arg("seed"), num_threads = py::arg("num_threads");
    module.def("quantize", &quantize_array, py::arg("x"), config, seed, py::arg("scales"), py::arg("codes"),
               py::arg("remainder"), num_threads);
    module.def("accumulate_quantized", &accumulate_quantized_arrays, py::arg("grads"), py::arg("terms"), config,
               py::arg("parts"), py::arg("keeps"), py::arg("scratch"), num_threads);
    module.def("dequantize", &dequantize_arrays, py::arg("scales"), py::arg("codes"), config, py::arg("out"),
               py::arg("scale"), py::arg("scratch"), num_threads);
    module.def("requantize", &requantize_arrays, py::arg("scales"), py::arg("codes"), py::arg("count"), config, seed,
               py::arg("out_scales"), py::arg("out_codes"), py::arg("remainder"), py::arg("scratch"), num_threads);
}

}  // namespace pycomm
