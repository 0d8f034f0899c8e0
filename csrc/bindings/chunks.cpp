#include "kernels/chunks.h"

#include "bindings/accumulation_arguments.h"
#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

ChunkFormat chunk_format_of(py::handle num_entries, py::handle chunk, py::handle num_bits) {
    const int64_t k = as_integer(num_entries, "k"), size = as_integer(chunk, "chunk"),
                  bits = as_integer(num_bits, "bits");
    if (size < 1 || size > kMostChunk || (size & (size - 1)) != 0) {
        throw ArgumentError(format("chunk is %lld, wanted a power of two up to %lld", static_cast<long long>(size),
                                   static_cast<long long>(kMostChunk)));
    }
    if (k < 1 || k > size) {
        throw ArgumentError(format("k is %lld, wanted 1 <= k <= %lld, the size of a chunk", static_cast<long long>(k),
                                   static_cast<long long>(size)));
    }
    if (bits != 2 && bits != 4 && bits != 8) {
        throw ArgumentError(format("bits is %lld, wanted 2, 4 or 8", static_cast<long long>(bits)));
    }
    return {k, size, static_cast<int>(bits)};
}

int64_t chunk_words(py::handle k, py::handle chunk, py::handle bits, py::handle how_many) {
    const int64_t count = as_integer(how_many, "count");
    if (count < 0) throw ArgumentError(format("count is %lld, wanted >= 0", static_cast<long long>(count)));
    return ChunkLayouts(chunk_format_of(k, chunk, bits), count).num_words();
}

void pack_chunks_of(py::handle x, py::handle k, py::handle chunk, py::handle bits, py::handle words,
                    py::object remainder, py::handle decay, int num_threads) {
    const ChunkFormat config = chunk_format_of(k, chunk, bits);
    const auto factor = static_cast<float>(as_number(decay, "decay"));
    Array source = as_floats(x, "x", Access::kRead);
    Array packed =
        as_exactly(words, "words", Access::kWrite, DType::kI32, ChunkLayouts(config, source.buffer.count).num_words(),
                   "int32, num_words(len(x)) of them");
    Array rest = as_remainder(remainder, source);
    Arguments arguments;
    arguments.reads(source, "x");
    arguments.writes(packed, "words");
    add_remainder(arguments, rest, source);
    arguments.require_apart();
    auto to = static_cast<uint32_t*>(packed.buffer.data);
    auto to_rest = static_cast<float*>(rest.buffer.data);
    dispatch(
        arguments, [&](auto& call) { cuda::pack_chunks(source.buffer, config, to, to_rest, factor, call.stream()); },
        [&] { pack_chunks(source.buffer, config, to, to_rest, factor, num_threads); });
}

void accumulate_chunks_of(py::handle grads, const py::dict& terms, py::handle k, py::handle chunk, py::handle bits,
                          py::handle words, py::handle decay, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    const ChunkFormat config = chunk_format_of(k, chunk, bits);
    const auto factor = static_cast<float>(as_number(decay, "packing_decay"));
    AccumulationArguments given(grads, terms);
    const Buffer& sums = given.job.acc;
    require_same(sums, "acc", Buffer{nullptr, sums.count, DType::kF32}, "required by pack_chunks");
    Array packed = as_exactly(words, "words", Access::kWrite, DType::kI32, ChunkLayouts(config, sums.count).num_words(),
                              "int32, num_words(len(acc)) of them");
    Arguments arguments;
    given.add_to(arguments);
    arguments.writes(packed, "words");
    arguments.require_apart();
    auto to = static_cast<uint32_t*>(packed.buffer.data);
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::accumulate_workspace_bytes(given.job));
            cuda::accumulate(given.job, given.factor().on_gpu(), given.finite(), workspace, call.stream());
            cuda::pack_chunks(sums, config, to, static_cast<float*>(sums.data), factor, call.stream());
        },
        [&] {
            accumulate_chunks(given.job, given.factor().on_cpu(), given.finite(), config, to, factor, num_threads);
        });
}

void unpack_chunks_of(py::handle words, py::handle k, py::handle chunk, py::handle bits, py::handle out,
                      py::handle scale, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    const ChunkFormat config = chunk_format_of(k, chunk, bits);
    Array target = as_floats(out, "out", Access::kWrite);
    std::vector<Array> packed = as_arrays(words, "words", Access::kRead);
    auto from =
        pointers_of<uint32_t>(packed, "words", DType::kI32, ChunkLayouts(config, target.buffer.count).num_words(),
                              "int32, num_words(len(out)) of them");
    Factor factor(scale);
    Arguments arguments;
    arguments.writes(target, "out");
    arguments.reads(packed, "words");
    factor.add_to(arguments);
    arguments.require_apart();
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::unpack_chunks_workspace_bytes(from.size()));
            cuda::unpack_chunks(from, config, target.buffer, factor.on_gpu(), workspace, call.stream());
        },
        [&] { unpack_chunks(from, config, target.buffer, factor.on_cpu(), num_threads); });
}

}  // namespace

void bind_chunks(py::module_& module) {
    auto num_threads = py::arg("num_threads");
    module.def("chunk_words", &chunk_words, py::arg("k"), py::arg("chunk"), py::arg("bits"), py::arg("count"));
    module.def("pack_chunks", &pack_chunks_of, py::arg("x"), py::arg("k"), py::arg("chunk"), py::arg("bits"),
               py::arg("words"), py::arg("remainder"), py::arg("decay"), num_threads);
    module.def("accumulate_chunks", &accumulate_chunks_of, py::arg("grads"), py::arg("terms"), py::arg("k"),
               py::arg("chunk"), py::arg("bits"), py::arg("words"), py::arg("packing_decay"), py::arg("scratch"),
               num_threads);
    module.def("unpack_chunks", &unpack_chunks_of, py::arg("words"), py::arg("k"), py::arg("chunk"), py::arg("bits"),
               py::arg("out"), py::arg("scale"), py::arg("scratch"), num_threads);
}

}  // namespace pycomm
