// Shared by the bindings of transports: checks of arguments, and of signals.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "kernels/reduce_op.h"

namespace pycomm {

// For waits without the interpreter's lock: throws what Python's signal handlers raise.
inline void check_python_signals() {
    if (PyGILState_GetThisThreadState() == nullptr) return;  // a thread of ours, in which no handler runs
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

inline bool is_reducible(const Buffer& x, ReduceOp op) {
    return is_floating(x.dtype) ? !is_bitwise(op) : op != ReduceOp::kMean;
}

inline void require_reducible(const Buffer& x, ReduceOp op, const char* name = "x") {
    if (is_reducible(x, op)) return;
    throw ArgumentTypeError(format("op '%s' requires %s dtype, %s has %s", name_of(op),
                                   is_floating(x.dtype) ? "an integer" : "a floating", name, name_of(x.dtype)));
}

class Group;

// The group whose method all_reduce `call` is; null if it is any other function.
Group* group_of_all_reduce(pybind11::handle call);
// Calls that method on a small array in CPU memory. It is called without pybind11's dispatcher, which takes as long as
// all of a small operation, and holds the interpreter's lock until it waits.
void all_reduce_small(Group& group, const Buffer& x, ReduceOp op, double timeout);
inline constexpr int64_t kSmallBytes = 64 << 10;

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

inline bool have_bytes_in_common(const Buffer& a, const Buffer& b) {
    if (a.count == 0 || b.count == 0) return false;
    return a.bytes() < b.bytes() + b.num_bytes() && b.bytes() < a.bytes() + a.num_bytes();
}

// Requires that out and x have no bytes in common, or that the smaller one is exactly this rank's part of the other.
inline void require_apart(const Buffer& out, const Buffer& x, int rank, int size) {
    if (!have_bytes_in_common(out, x)) return;
    bool gathers = out.count > x.count;
    const Buffer &whole = gathers ? out : x, &part = gathers ? x : out;
    bool holds_parts = whole.count > part.count || size == 1;
    if (rank >= 0 && holds_parts && part.bytes() == whole.bytes() + rank * part.num_bytes()) return;
    throw ArgumentError("out overlaps x, wanted arrays apart, or one that is this rank's part of the other");
}

inline std::string name_of_part(const char* name, size_t p) { return format("%s[%zu]", name, p); }

// Requires that no array of `outs` has bytes in common with another one or with one of `xs`. Only outs[rank] may be
// xs[rank]: nothing is written there.
inline void require_apart(const std::vector<Buffer>& outs, const std::vector<Buffer>& xs, int rank) {
    const auto own = static_cast<size_t>(rank);
    const bool in_place = outs[own].data == xs[own].data && outs[own].num_bytes() == xs[own].num_bytes();
    for (size_t p = 0; p < outs.size(); ++p) {
        for (size_t q = 0; q < outs.size(); ++q) {
            if (q < p && have_bytes_in_common(outs[p], outs[q])) {
                throw ArgumentError(name_of_part("outs", p) + " overlaps " + name_of_part("outs", q) +
                                    ", wanted arrays apart");
            }
            if ((p == own && in_place) || !have_bytes_in_common(outs[p], xs[q])) continue;
            throw ArgumentError(name_of_part("outs", p) + " overlaps " + name_of_part("xs", q) +
                                ", wanted arrays apart, or outs[rank] and xs[rank] the same");
        }
    }
}

// Requires that xs, one array for each rank, can be reduced into out.
inline void require_contributions(const Buffer& out, const std::vector<Buffer>& xs, int rank) {
    const auto own = static_cast<size_t>(rank);
    for (size_t p = 0; p < xs.size(); ++p) {
        const Buffer& x = xs[p];
        if (x.data == nullptr && x.count == 0) continue;  // of any dtype
        if (x.tag != 0 || x.dtype != out.dtype) {
            throw ArgumentTypeError(format("%s has %s, wanted dtype %s as out", name_of_part("xs", p).c_str(),
                                           x.tag != 0 ? "another dtype" : name_of(x.dtype), name_of(out.dtype)));
        }
        const bool in_place = p == own && x.data == out.data && x.count == out.count;
        if (in_place || !have_bytes_in_common(out, x)) continue;
        throw ArgumentError("out overlaps " + name_of_part("xs", p) +
                            ", wanted arrays apart, or out and xs[rank] the same");
    }
    if (xs[own].count == out.count) return;
    throw ArgumentError(format("out has %lld elements, wanted %lld, as %s has", static_cast<long long>(out.count),
                               static_cast<long long>(xs[own].count), name_of_part("xs", own).c_str()));
}

// Requires that `pieces`, one after the other, can stand for the elements of x from `begin` on: they have x's floating
// dtype, and no bytes in common with x, except for pieces at their own place.
inline void require_pieces(const Buffer& x, int64_t begin, const std::vector<Buffer>& pieces) {
    if (begin < 0 || begin > x.count) throw ArgumentError("begin lies outside of x");
    int64_t at = begin;
    for (size_t i = 0; i < pieces.size(); ++i) {
        const Buffer& piece = pieces[i];
        const std::string name = name_of_part("pieces", i);
        if (!is_floating(x.dtype) || piece.dtype != x.dtype) {
            throw ArgumentTypeError(format("%s has dtype %s, x %s, wanted the same floating one", name.c_str(),
                                           name_of(piece.dtype), name_of(x.dtype)));
        }
        if (piece.device != Buffer::kHost) throw ArgumentError(name + " does not lie in CPU memory");
        if (piece.count > x.count - at) throw ArgumentError(name + " ends beyond x");
        const bool is_in_place = piece.data == x.bytes() + at * size_of(x.dtype);
        if (!is_in_place && have_bytes_in_common(piece, x)) throw ArgumentError(name + " overlaps x elsewhere");
        at += piece.count;
    }
}

}  // namespace pycomm
