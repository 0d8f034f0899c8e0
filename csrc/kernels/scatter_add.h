// scatter_add: computes out[indices[j]] += values[j] * scale, in ascending order of j.
//
// values and out are of any floating types. The product is computed in float (double if either side is double) and
// rounded before the sum, which is rounded to out's dtype each time. Repeated indices add up in order. An index outside
// out is an ArgumentError, and then nothing is written.
//
// An output overlaps no other array of the call.
#pragma once

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm {

void scatter_add(const Buffer& out, const int32_t* indices, const Buffer& values, double scale);

namespace cuda {

int64_t scatter_add_workspace_bytes();
// Ascending indices, as topk gives them, are added in parallel; others take one pass over all indices per block. An
// index outside out becomes a fault.
void scatter_add(const Buffer& out, const int32_t* indices, const Buffer& values, Scale scale, Workspace& workspace,
                 Stream stream);

}  // namespace cuda
}  // namespace pycomm
