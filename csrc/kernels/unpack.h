// unpack: casts and scales one array into many, the inverse of pack.
//
//   outs[j][i] = cast(flat[offset_j + i] * scale)
//
// Types, rounding, aliasing, alignment and empties as in pack.h.
#pragma once

#include <vector>

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm {

void unpack(const Buffer& flat, const std::vector<Buffer>& outs, double scale, int num_threads);

namespace cuda {

int64_t unpack_workspace_bytes(std::size_t num_arrays);
void unpack(const Buffer& flat, const std::vector<Buffer>& outs, Scale scale, Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
