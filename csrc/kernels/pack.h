// pack: many arrays into one, cast and scaled, and whether all of it is finite.
//
//   out[offset_j + i] = cast(srcs[j][i] * scale),  offset_j = count_0 + ... + count_{j-1}
//
// Floating types in any combination. Computed in float, in double where either side is double; one rounding to the
// nearest even per conversion (double to a half type rounds through float). Returns true when every value *written* is
// finite: an overflow in the cast counts. srcs and out may be empty and of any alignment; out overlaps no source,
// except a source that already lies exactly at its place in out with out's dtype.
#pragma once

#include <vector>

#include "base/buffer.h"

namespace pycomm {

bool pack(const std::vector<Buffer>& srcs, const Buffer& out, double scale, int num_threads);

}  // namespace pycomm
