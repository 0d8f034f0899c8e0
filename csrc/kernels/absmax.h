// absmax: the largest magnitude in many arrays, NaN if any element is NaN; 0 for no elements. Any floating types; the
// result is rounded to float.
// What is written overlaps nothing else of the call.
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
