// topk: selects the k elements of largest magnitude, exactly.
//
//   indices ascending; values[j] = x[indices[j]], signs kept, dtype of x.
//
// Ties go to the lowest index; every NaN counts as equal to every other and above inf; -0 equals +0. 1 <= k <= count,
// count <= 2^31 - 1, x of any floating type and alignment.
//
// It takes about one read of x (float32 on the CPU, all types on a GPU): a guess at a threshold a little below the k-th
// magnitude, one pass that collects the elements that reach it, and a radix selection among these candidates. The guess
// is kThresholdHint of `threshold`, where that holds the k-th magnitude of an earlier similar x, positive and finite;
// otherwise it comes from a sample at fixed places. If the guess was too high (fewer than k candidates) or too low
// (more than there is room for: ties, adversarial order), the sample is tried if it has not been, and then a radix
// selection over x itself, with a few more reads. The result depends on x and k alone. `threshold`, where it is not
// null, is set to the k-th magnitude, rounded to float.
//
// On a processor the pass is bound by memory, and the selection by instructions: some 4 ns for each candidate. At 1 %
// there are a third more than k, at 0.1 % about twice as many.
//
// An output overlaps no other array of the call.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm {

// A gradient's k-th magnitude may fall by a few per cent from one step to the next; this still leaves few candidates.
inline constexpr float kThresholdHint = 0.9f;

void topk(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices, float* threshold, int num_threads);

namespace cuda {

int64_t topk_workspace_bytes(const Buffer& x, int64_t k);
// One kernel, all of whose blocks run at once. `threshold` lies on the device.
void topk(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices, float* threshold, Workspace& workspace,
          Stream stream);

}  // namespace cuda
}  // namespace pycomm
