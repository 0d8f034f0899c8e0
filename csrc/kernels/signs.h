// pack_signs, unpack_signs: floats as one bit per element and one magnitude for all.
//
//   pack_signs: bit i % 32 of word i / 32 is set where x[i] is negative (-0 and NaN by their sign bit); the bits after
//   the last element are 0. With `remainder`, which may be x itself, remainder[i] = x[i] - (+-magnitude).
//   unpack_signs: out[i] = (sum over p of +-magnitudes[p], in the order of p) * factor
//
// x, out and magnitudes are float32.
// Except for remainder and x, an output overlaps no other array of the call.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm {

void pack_signs(const Buffer& x, const float* magnitude, uint32_t* words, float* remainder, int num_threads);
void unpack_signs(const std::vector<const uint32_t*>& words, const std::vector<const float*>& magnitudes,
                  const Buffer& out, double factor, int num_threads);

namespace cuda {

// magnitudes lie on the device.
void pack_signs(const Buffer& x, const float* magnitude, uint32_t* words, float* remainder, Stream stream);
int64_t unpack_signs_workspace_bytes(size_t num_contributions);
void unpack_signs(const std::vector<const uint32_t*>& words, const std::vector<const float*>& magnitudes,
                  const Buffer& out, Scale factor, Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
