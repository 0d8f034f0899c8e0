// pack: many arrays into one, cast and scaled, and whether all of it is finite.
//
//   out[offset_j + i] = cast(srcs[j][i] * scale),  offset_j = count_0 + ... + count_{j-1}
//
// Floating types in any combination. Computed in float, in double where either side is double; one rounding to the
// nearest even per conversion (double to a half type rounds through float). Finite means: every value *written* is, so
// an overflow in the cast counts; and src * scale is below `limit` in magnitude, where that is given (as a float,
// unless computed in double). srcs and out may be empty and of any alignment; out overlaps no source, except a source
// that already lies exactly at its place in out with out's dtype.
#pragma once

#include <vector>

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm {

// Returns whether all is finite.
bool pack(const std::vector<Buffer>& srcs, const Buffer& out, double scale, double limit, int num_threads);

namespace cuda {

int64_t pack_workspace_bytes(std::size_t num_arrays);
// One launch for all srcs. *finite, on the device, says whether all is finite; may be null. Where *unless, on the
// device, is true, nothing is written (and *finite is true); may be null.
void pack(const std::vector<Buffer>& srcs, const Buffer& out, Scale scale, double limit, bool* finite,
          const bool* unless, Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
