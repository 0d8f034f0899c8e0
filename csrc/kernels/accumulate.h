// accumulate: error feedback's first half, in one pass.
//
//   acc[i] = residual[i] + grad[i] * scale       (residual may be absent: zeros)
//
// acc and residual are float32, or float64 when grad is; grad is any floating type. The product is rounded before the
// sum. Returns true when everything written is finite. acc may be exactly residual or exactly grad (same dtype).
#pragma once

#include "base/buffer.h"

namespace pycomm {

bool accumulate(const Buffer& acc, const Buffer* residual, const Buffer& grad, double scale, int num_threads);

}  // namespace pycomm
