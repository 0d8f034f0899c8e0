// absmax: finds the largest magnitude in many arrays of any floating types, rounded to float: NaN if any element is
// NaN, 0 if there are no elements.
//
// An output overlaps no other array of the call.
#pragma once

#include <vector>

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm {

float absmax(const std::vector<Buffer>& arrays, int num_threads);

namespace cuda {

int64_t absmax_workspace_bytes(std::size_t num_arrays);
// Writes the result to *out, on the device.
void absmax(const std::vector<Buffer>& arrays, float* out, Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
