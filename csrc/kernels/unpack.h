// unpack: the inverse of pack.
//
//   outs[j][i] = cast(flat[offset_j + i] * scale)
//
// Types, rounding, aliasing, alignment and empties as in pack.h.
#pragma once

#include <vector>

#include "base/buffer.h"

namespace pycomm {

void unpack(const Buffer& flat, const std::vector<Buffer>& outs, double scale, int num_threads);

}  // namespace pycomm
