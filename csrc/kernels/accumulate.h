// accumulate: error feedback's first half, in one pass.
//
//   acc[i] = residual[i] + grad[i] * scale       (residual may be absent: zeros)
//
// acc and residual are float32, or float64 when grad is; grad is any floating type. The product is rounded before the
// sum. Finite means: everything written is. acc may be exactly residual or exactly grad (same dtype).
#pragma once

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm {

// Returns whether all is finite.
bool accumulate(const Buffer& acc, const Buffer* residual, const Buffer& grad, double scale, int num_threads);

namespace cuda {

// *finite, on the device, says whether all is finite; may be null.
void accumulate(const Buffer& acc, const Buffer* residual, const Buffer& grad, Scale scale, bool* finite,
                Stream stream);

}  // namespace cuda
}  // namespace pycomm
