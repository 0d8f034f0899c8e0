// Conversion of whole arrays, for reductions in a wider type.
#pragma once

#include "base/buffer.h"
#include "kernels/cpu/loops/loops.h"

namespace pycomm {

// to[i] = from[i] * scale, rounded once. `to` may be `from`.
inline void convert(const Buffer& to, const Buffer& from, double scale) {
    loops().convert(from.data, from.dtype, to.data, to.dtype, to.count, scale, kNoLimit, Store::kCached);
}

}  // namespace pycomm
