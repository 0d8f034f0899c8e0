// topk: the k elements of largest magnitude, exactly.
//
//   indices ascending; values[j] = x[indices[j]], signs kept, dtype of x.
//
// Ties go to the lowest index; every NaN counts as equal to every other and above inf; -0 equals +0. 1 <= k <= count,
// count <= 2^31 - 1, x of any floating type and alignment.
//
// About one read of x (float32 on the CPU, all types on a GPU): a guess at a threshold a little below the k-th
// magnitude, one pass that collects what reaches it, and a radix selection among those candidates. The guess comes from
// a sample at fixed places, or, where `threshold` holds the k-th magnitude of an earlier similar x, is 0.98 of that (a
// number that is not positive and finite counts as none). When the guess was too high (fewer than k candidates) or too
// low (more than there is room for: ties, adversarial order), the sample is tried where it has not been, and then a
// radix selection over x itself with a few more reads. The result depends on x and k alone. `threshold`, where not
// null, is left with the k-th magnitude, rounded to float.
// What is written overlaps nothing else of the call.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm {

void topk(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices, float* threshold, int num_threads);

namespace cuda {

int64_t topk_workspace_bytes(const Buffer& x, int64_t k);
// One kernel, all of whose blocks run at once. `threshold` lies on the device.
void topk(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices, float* threshold, Workspace& workspace,
          Stream stream);

}  // namespace cuda
}  // namespace pycomm
