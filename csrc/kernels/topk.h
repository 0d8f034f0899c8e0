// topk: the k elements of largest magnitude, exactly.
//
//   indices ascending; values[j] = x[indices[j]], signs kept, dtype of x.
//
// Ties go to the lowest index; every NaN counts as equal to every other and above inf; -0 equals +0. 1 <= k <= count,
// count <= 2^31 - 1, x of any floating type and alignment.
//
// float32 costs about one read of x: a sample suggests a threshold a little below the k-th magnitude, one pass collects
// what exceeds it, and a radix selection among those candidates finishes. When the threshold was too high (fewer than k
// candidates) or too low (more than the workspace holds: ties, adversarial order) a radix selection over x itself
// finds the exact threshold with three more reads. The sample is taken at fixed places, so the result *and* the work
// depend on the input alone.
#pragma once

#include <cstdint>

#include "base/buffer.h"

namespace pycomm {

void topk(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices, int num_threads);

}  // namespace pycomm
