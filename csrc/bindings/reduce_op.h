// Reductions by name.
#pragma once

#include <optional>
#include <string>

#include "base/error.h"
#include "bindings/scalars.h"
#include "kernels/reduce_op.h"

namespace pycomm {

// By the identity of the string; none if that is not the interned name of a reduction.
inline std::optional<ReduceOp> known_reduce_op(py::handle object) {
    static PyObject* const* const names = [] {
        auto* made = new PyObject*[kNumReduceOps];
        for (int i = 0; i < kNumReduceOps; ++i) made[i] = PyUnicode_InternFromString(name_of(static_cast<ReduceOp>(i)));
        return made;
    }();
    for (int i = 0; i < kNumReduceOps; ++i) {
        if (object.ptr() == names[i]) return static_cast<ReduceOp>(i);
    }
    return std::nullopt;
}

inline ReduceOp reduce_op_named(py::handle object) {
    constexpr const char* kWanted = "'sum', 'mean', 'min', 'max', 'product', 'band', 'bor' or 'bxor'";
    const std::string name = as_text(object, "op", kWanted);
    for (int i = 0; i < kNumReduceOps; ++i) {
        if (name == name_of(static_cast<ReduceOp>(i))) return static_cast<ReduceOp>(i);
    }
    throw ArgumentError(format("op is '%s', wanted %s", name.c_str(), kWanted));
}

}  // namespace pycomm
