// Reductions by name.
#pragma once

#include <string>

#include "base/error.h"
#include "bindings/scalars.h"
#include "kernels/reduce_op.h"

namespace pycomm {

inline ReduceOp reduce_op_named(py::handle object) {
    const std::string name = as_text(object, "op", "'sum', 'mean', 'min' or 'max'");
    if (name == "sum") return ReduceOp::kSum;
    if (name == "mean") return ReduceOp::kMean;
    if (name == "min") return ReduceOp::kMin;
    if (name == "max") return ReduceOp::kMax;
    throw ArgumentError(format("op is '%s', wanted 'sum', 'mean', 'min' or 'max'", name.c_str()));
}

}  // namespace pycomm
