// Shared by the bindings of transports: checks of arguments, and of signals.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "base/buffer.h"
#include "base/error.h"
#include "kernels/reduce_op.h"

namespace pycomm {

// For waits without the interpreter's lock: throws what Python's signal handlers raise.
inline void check_python_signals() {
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

inline void require_reducible(const Buffer& x, ReduceOp op) {
    if (op != ReduceOp::kMean || is_floating(x.dtype)) return;
    throw ArgumentTypeError(format("op 'mean' wants a floating dtype, x has %s", name_of(x.dtype)));
}

// Requires that `whole` holds a part per rank.
inline void require_ratio(const Buffer& whole, const char* whole_name, const Buffer& part, const char* part_name,
                          int size) {
    if (whole.tag != part.tag) {
        throw ArgumentTypeError(format("%s and %s have different dtypes", whole_name, part_name));
    }
    if (whole.dtype != part.dtype) {
        throw ArgumentTypeError(format("%s has dtype %s, wanted %s as %s", whole_name, name_of(whole.dtype),
                                       name_of(part.dtype), part_name));
    }
    int64_t wanted;
    if (__builtin_mul_overflow(part.count, static_cast<int64_t>(size), &wanted)) wanted = INT64_MAX;
    if (whole.count != wanted) {
        throw ArgumentError(format("%s has %lld elements, wanted %lld: %d ranks times the %lld of %s", whole_name,
                                   static_cast<long long>(whole.count), static_cast<long long>(wanted), size,
                                   static_cast<long long>(part.count), part_name));
    }
}

inline void require_rank(int64_t rank, const char* name, int size) {
    if (rank >= 0 && rank < size) return;
    throw ArgumentError(format("%s is %lld, wanted 0 <= %s < %d", name, static_cast<long long>(rank), name, size));
}

// Requires that out and x have no bytes in common, or that the smaller one is exactly this rank's part of the other.
inline void require_apart(const Buffer& out, const Buffer& x, int rank, int size) {
    if (out.count == 0 || x.count == 0) return;
    if (out.bytes() >= x.bytes() + x.num_bytes() || x.bytes() >= out.bytes() + out.num_bytes()) return;
    bool gathers = out.count > x.count;
    const Buffer &whole = gathers ? out : x, &part = gathers ? x : out;
    bool holds_parts = whole.count > part.count || size == 1;
    if (rank >= 0 && holds_parts && part.bytes() == whole.bytes() + rank * part.num_bytes()) return;
    throw ArgumentError("out overlaps x, wanted arrays apart, or one that is this rank's part of the other");
}

}  // namespace pycomm
