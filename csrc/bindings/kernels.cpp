#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/device_call.h"
#include "bindings/kernel_arguments.h"
#include "bindings/reduce_op.h"
#include "kernels/absmax.h"
#include "kernels/cpu/loops/loops.h"
#include "kernels/pack.h"
#include "kernels/reduce.h"
#include "kernels/scatter_add.h"
#include "kernels/topk.h"
#include "kernels/unpack.h"

namespace pycomm {
namespace {

void require_total(const std::vector<Buffer>& parts, const char* parts_name, const Buffer& flat,
                   const char* flat_name) {
    int64_t total = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
        require_floating(parts[i], std::string(parts_name) + "[" + std::to_string(i) + "]");
        total += parts[i].count;
    }
    require_floating(flat, flat_name);
    if (total == flat.count) return;
    throw ArgumentError(format("%s has %lld elements, wanted %lld: the sum over %s", flat_name,
                               static_cast<long long>(flat.count), static_cast<long long>(total), parts_name));
}

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
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            cuda::Workspace& workspace = call.workspace(memory, cuda::pack_workspace_bytes(buffers.size()));
            without_gil([&] {
                cuda::pack(buffers, target.buffer, factor.scale, most, answer, skip, workspace, call.stream());
            });
            return call.finish();
        }
    }
    require_number(factor);
    py::gil_scoped_release release;
    *answer = (skip != nullptr && *skip) || pack(buffers, target.buffer, factor.scale.value, most, num_threads);
}

void unpack_array(py::handle flat, py::handle tensors, py::handle scale, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    Array source = as_array(flat, "flat", Access::kRead);
    std::vector<Array> targets = as_arrays(tensors, "tensors", Access::kWrite);
    Factor factor(scale);
    std::vector<Buffer> buffers = buffers_of(targets);
    require_total(buffers, "tensors", source.buffer, "flat");
    Arguments arguments;
    arguments.reads(source, "flat");
    arguments.writes(targets, "tensors");
    factor.add_to(arguments);
    excuse_in_place(arguments, targets, source);
    arguments.require_apart();
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            cuda::Workspace& workspace = call.workspace(memory, cuda::unpack_workspace_bytes(buffers.size()));
            without_gil([&] { cuda::unpack(source.buffer, buffers, factor.scale, workspace, call.stream()); });
            return call.finish();
        }
    }
    require_number(factor);
    py::gil_scoped_release release;
    unpack(source.buffer, buffers, factor.scale.value, num_threads);
}

void reduce_arrays(py::handle out, py::handle inputs, py::handle op_name, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    Array target = as_array(out, "out", Access::kWrite);
    std::vector<Array> sources = as_arrays(inputs, "inputs", Access::kRead);
    std::vector<Buffer> buffers = buffers_of(sources);
    for (size_t i = 0; i < buffers.size(); ++i) {
        require_same(buffers[i], "inputs[" + std::to_string(i) + "]", target.buffer, "out");
    }
    ReduceOp op = reduce_op_named(op_name);
    if (op == ReduceOp::kMean && !is_floating(target.buffer.dtype)) {
        throw ArgumentTypeError(format("op 'mean' wants a floating dtype, out has %s", name_of(target.buffer.dtype)));
    }
    Arguments arguments;
    arguments.writes(target, "out");
    arguments.reads(sources, "inputs");
    for (const Array& source : sources) arguments.may_be(target, source);
    arguments.require_apart();
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            cuda::Workspace& workspace = call.workspace(memory, cuda::reduce_workspace_bytes(buffers.size()));
            without_gil([&] { cuda::reduce(target.buffer, buffers, op, workspace, call.stream()); });
            return call.finish();
        }
    }
    py::gil_scoped_release release;
    reduce(target.buffer, buffers, op, num_threads);
}

void topk_array(py::handle x, py::handle how_many, py::handle values, py::handle indices, py::object threshold,
                py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    Array source = as_array(x, "x", Access::kRead);
    Array top = as_array(values, "values", Access::kWrite);
    Array places = as_array(indices, "indices", Access::kWrite);
    require_floating(source.buffer, "x");
    const int64_t k = as_integer(how_many, "k");
    int64_t n = source.buffer.count;
    if (n > INT32_MAX) {
        throw ArgumentError(
            format("x has %lld elements, wanted at most 2147483647: indices are int32", static_cast<long long>(n)));
    }
    if (k < 1 || k > n) {
        throw ArgumentError(format("k is %lld, wanted 1 <= k <= %lld, the number of elements of x",
                                   static_cast<long long>(k), static_cast<long long>(n)));
    }
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
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            cuda::Workspace& workspace = call.workspace(memory, cuda::topk_workspace_bytes(source.buffer, k));
            without_gil([&] { cuda::topk(source.buffer, k, top.buffer, to, magnitude, workspace, call.stream()); });
            return call.finish();
        }
    }
    py::gil_scoped_release release;
    topk(source.buffer, k, top.buffer, to, magnitude, num_threads);
}

void scatter_add_arrays(py::handle out, py::handle indices, py::handle values, py::handle scale, py::handle scratch) {
    Scratch* const memory = scratch_of(scratch);
    Array target = as_array(out, "out", Access::kWrite);
    Array places = as_array(indices, "indices", Access::kRead);
    Array terms = as_array(values, "values", Access::kRead);
    Factor factor(scale);
    require_floating(target.buffer, "out");
    require_floating(terms.buffer, "values");
    require_same(places.buffer, "indices", Buffer{nullptr, terms.buffer.count, DType::kI32}, "int32[len(values)]");
    Arguments arguments;
    require_aligned(places.buffer, "indices");
    arguments.writes(target, "out");
    arguments.reads(places, "indices");
    arguments.reads(terms, "values");
    factor.add_to(arguments);
    arguments.require_apart();
    auto where = static_cast<const int32_t*>(places.buffer.data);
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            cuda::Workspace& workspace = call.workspace(memory, cuda::scatter_add_workspace_bytes());
            without_gil(
                [&] { cuda::scatter_add(target.buffer, where, terms.buffer, factor.scale, workspace, call.stream()); });
            return call.finish();
        }
    }
    require_number(factor);
    py::gil_scoped_release release;
    scatter_add(target.buffer, where, terms.buffer, factor.scale.value);
}

void absmax_arrays(py::handle tensors, py::handle out, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    std::vector<Array> sources = as_arrays(tensors, "tensors", Access::kRead);
    Array target = as_answer(out, "out", sizeof(float));
    std::vector<Buffer> buffers = buffers_of(sources);
    for (size_t i = 0; i < buffers.size(); ++i) require_floating(buffers[i], "tensors[" + std::to_string(i) + "]");
    Arguments arguments;
    arguments.writes(target, "out");
    arguments.reads(sources, "tensors");
    arguments.require_apart();
    auto answer = static_cast<float*>(target.buffer.data);
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            cuda::Workspace& workspace = call.workspace(memory, cuda::absmax_workspace_bytes(buffers.size()));
            without_gil([&] { cuda::absmax(buffers, answer, workspace, call.stream()); });
            return call.finish();
        }
    }
    py::gil_scoped_release release;
    *answer = absmax(buffers, num_threads);
}

}  // namespace

void bind_kernels(py::module_& module) {
    py::class_<Scratch>(module, "Scratch").def(py::init<>());
    auto scratch = py::arg("scratch");
    auto num_threads = py::arg("num_threads");
    module.def("pack", &pack_arrays, py::arg("tensors"), py::arg("out"), py::arg("scale"), py::arg("limit"),
               py::arg("finite"), py::arg("unless"), scratch, num_threads);
    module.def("unpack", &unpack_array, py::arg("flat"), py::arg("tensors"), py::arg("scale"), scratch, num_threads);
    module.def("reduce", &reduce_arrays, py::arg("out"), py::arg("inputs"), py::arg("op"), scratch, num_threads);
    module.def("topk", &topk_array, py::arg("x"), py::arg("k"), py::arg("values"), py::arg("indices"),
               py::arg("threshold"), scratch, num_threads);
    module.def("scatter_add", &scatter_add_arrays, py::arg("out"), py::arg("indices"), py::arg("values"),
               py::arg("scale"), scratch);
    module.def("absmax", &absmax_arrays, py::arg("tensors"), py::arg("out"), scratch, num_threads);
    module.def(
        "look",
        [](py::handle array, const std::string& name) {
            auto [count, dtype] = look(array, name);
            return std::pair{count, std::string(name_of(dtype))};
        },
        py::arg("array"), py::arg("name"));
    module.def("simd", [] { return std::string(loops().name); });
    module.def(
        "select_simd",
        [](const std::string& name) {
            if (!select_loops(name.c_str())) throw ArgumentError("this build or processor has no " + name);
        },
        py::arg("name"));
}

}  // namespace pycomm
