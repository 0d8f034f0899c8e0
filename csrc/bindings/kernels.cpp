#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/reduce_op.h"
#include "kernels/absmax.h"
#include "kernels/accumulate.h"
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

void require_same(const Buffer& buffer, const std::string& name, const Buffer& wanted, const char* wanted_name) {
    if (buffer.dtype != wanted.dtype) {
        throw ArgumentTypeError(format("%s has dtype %s, wanted %s as %s", name.c_str(), name_of(buffer.dtype),
                                       name_of(wanted.dtype), wanted_name));
    }
    if (buffer.count != wanted.count) {
        throw ArgumentError(format("%s has %lld elements, wanted %lld as %s", name.c_str(),
                                   static_cast<long long>(buffer.count), static_cast<long long>(wanted.count),
                                   wanted_name));
    }
}

bool pack_arrays(py::handle tensors, py::handle out, double scale, int num_threads) {
    std::vector<Array> sources = as_arrays(tensors, "tensors", Access::kRead);
    Array target = as_array(out, "out", Access::kWrite);
    std::vector<Buffer> buffers = buffers_of(sources);
    require_total(buffers, "tensors", target.buffer, "out");
    py::gil_scoped_release release;
    return pack(buffers, target.buffer, scale, num_threads);
}

void unpack_array(py::handle flat, py::handle tensors, double scale, int num_threads) {
    Array source = as_array(flat, "flat", Access::kRead);
    std::vector<Array> targets = as_arrays(tensors, "tensors", Access::kWrite);
    std::vector<Buffer> buffers = buffers_of(targets);
    require_total(buffers, "tensors", source.buffer, "flat");
    py::gil_scoped_release release;
    unpack(source.buffer, buffers, scale, num_threads);
}

void reduce_arrays(py::handle out, py::handle inputs, const std::string& op_name, int num_threads) {
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
    py::gil_scoped_release release;
    reduce(target.buffer, buffers, op, num_threads);
}

void topk_array(py::handle x, int64_t k, py::handle values, py::handle indices, int num_threads) {
    Array source = as_array(x, "x", Access::kRead);
    Array top = as_array(values, "values", Access::kWrite);
    Array places = as_array(indices, "indices", Access::kWrite);
    require_floating(source.buffer, "x");
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
    py::gil_scoped_release release;
    topk(source.buffer, k, top.buffer, static_cast<int32_t*>(places.buffer.data), num_threads);
}

void scatter_add_arrays(py::handle out, py::handle indices, py::handle values, double scale) {
    Array target = as_array(out, "out", Access::kWrite);
    Array places = as_array(indices, "indices", Access::kRead);
    Array terms = as_array(values, "values", Access::kRead);
    require_floating(target.buffer, "out");
    require_floating(terms.buffer, "values");
    require_same(places.buffer, "indices", Buffer{nullptr, terms.buffer.count, DType::kI32}, "int32[len(values)]");
    py::gil_scoped_release release;
    scatter_add(target.buffer, static_cast<const int32_t*>(places.buffer.data), terms.buffer, scale);
}

bool accumulate_arrays(py::handle acc, py::object residual, py::handle grad, double scale, int num_threads) {
    Array target = as_array(acc, "acc", Access::kWrite);
    Array source = as_array(grad, "grad", Access::kRead);
    require_floating(source.buffer, "grad");
    DType wide = source.buffer.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    require_same(target.buffer, "acc", Buffer{nullptr, source.buffer.count, wide}, "grad (in float32, or float64)");
    Array old;
    if (!residual.is_none()) {
        old = as_array(residual, "residual", Access::kRead);
        require_same(old.buffer, "residual", target.buffer, "acc");
    }
    py::gil_scoped_release release;
    return accumulate(target.buffer, residual.is_none() ? nullptr : &old.buffer, source.buffer, scale, num_threads);
}

float absmax_arrays(py::handle tensors, int num_threads) {
    std::vector<Array> sources = as_arrays(tensors, "tensors", Access::kRead);
    std::vector<Buffer> buffers = buffers_of(sources);
    for (size_t i = 0; i < buffers.size(); ++i) require_floating(buffers[i], "tensors[" + std::to_string(i) + "]");
    py::gil_scoped_release release;
    return absmax(buffers, num_threads);
}

}  // namespace

void bind_kernels(py::module_& module) {
    module.def("pack", &pack_arrays, py::arg("tensors"), py::arg("out"), py::arg("scale"), py::arg("num_threads"));
    module.def("unpack", &unpack_array, py::arg("flat"), py::arg("tensors"), py::arg("scale"), py::arg("num_threads"));
    module.def("reduce", &reduce_arrays, py::arg("out"), py::arg("inputs"), py::arg("op"), py::arg("num_threads"));
    module.def("topk", &topk_array, py::arg("x"), py::arg("k"), py::arg("values"), py::arg("indices"),
               py::arg("num_threads"));
    module.def("scatter_add", &scatter_add_arrays, py::arg("out"), py::arg("indices"), py::arg("values"),
               py::arg("scale"));
    module.def("accumulate", &accumulate_arrays, py::arg("acc"), py::arg("residual"), py::arg("grad"), py::arg("scale"),
               py::arg("num_threads"));
    module.def("absmax", &absmax_arrays, py::arg("tensors"), py::arg("num_threads"));
    module.def("simd", [] { return std::string(loops().name); });
    module.def(
        "select_simd",
        [](const std::string& name) {
            if (!select_loops(name.c_str())) throw ArgumentError("this build or processor has no " + name);
        },
        py::arg("name"));
}

}  // namespace pycomm
