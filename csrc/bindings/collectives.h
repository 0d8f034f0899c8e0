// What the arguments of collectives must be like, whatever the transport.
#pragma once

#include <string>

#include "base/buffer.h"
#include "base/error.h"
#include "kernels/reduce.h"

namespace pycomm {

inline void require_reducible(const Buffer& x, ReduceOp op) {
    if (op != ReduceOp::kMean || is_floating(x.dtype)) return;
    throw ArgumentTypeError(format("op 'mean' wants a floating dtype, x has %s", name_of(x.dtype)));
}

// One of them holds a part per rank.
inline void require_ratio(const Buffer& whole, const char* whole_name, const Buffer& part, const char* part_name,
                          int size) {
    if (whole.dtype != part.dtype) {
        throw ArgumentTypeError(format("%s has dtype %s, wanted %s as %s", whole_name, name_of(whole.dtype),
                                       name_of(part.dtype), part_name));
    }
    if (whole.count != part.count * size) {
        throw ArgumentError(format("%s has %lld elements, wanted %lld: %d ranks times the %lld of %s", whole_name,
                                   static_cast<long long>(whole.count), static_cast<long long>(part.count * size), size,
                                   static_cast<long long>(part.count), part_name));
    }
}

inline void require_rank(int rank, const char* name, int size) {
    if (rank >= 0 && rank < size) return;
    throw ArgumentError(format("%s is %d, wanted 0 <= %s < %d", name, rank, name, size));
}

}  // namespace pycomm
