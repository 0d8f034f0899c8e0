// quantize, dequantize: floats as small integers with a scale per block.
//
//   scale[b] = norm of block b / levels; the norm is the largest magnitude, or the Euclidean length, whose squares are
//           added as floats: it is inf where they overflow (from about 1e18 on) and 0 where they vanish (below 1e-22)
//   level = |x[i]| / scale, rounded: to the nearest, ties to even; or, stochastically, down or up so that the
//           expectation is exact. Never above `levels`.
//   code = level with x's sign, in two's complement of `bits` bits; element i at bit (i * bits) % 8 of byte
//           i * bits / 8
//
// A block is `block` consecutive elements, a multiple of 64; the last may be shorter. A scale below 2^-100 is written
// as 0, and the codes of its block are 0. x is float32. A block with an element that is not finite gets a scale that is
// not finite either, and codes without a meaning. bits is 2, 4 or 8, levels < 2^(bits - 1).
//
// Random numbers follow from seed[0], seed[1] and i alone: they are the same everywhere, and no state is kept.
//
// With `remainder`, which may be x itself, remainder[i] = x[i] - code * scale, with that product as dequantize computes
// it: the second half of error feedback.
//
//   dequantize: out[i] = (sum over p of codes[p][i] * scales[p][b], in the order of p) * factor
//
// Except for remainder and x, an output overlaps no other array of the call.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "kernels/on_device.h"
#include "kernels/quantization.h"

namespace pycomm {

inline int64_t num_blocks(const Quantization& config, int64_t count) {
    return (count + config.block - 1) / config.block;
}
inline int64_t code_bytes(const Quantization& config, int64_t count) { return (count * config.bits + 7) / 8; }

// seed: two numbers, or null for rounding to the nearest.
void quantize(const Buffer& x, const Quantization& config, const int64_t* seed, float* scales, uint8_t* codes,
              float* remainder, int num_threads);
// scales[p] and codes[p], one each for every contribution.
void dequantize(const std::vector<const float*>& scales, const std::vector<const uint8_t*>& codes,
                const Quantization& config, const Buffer& out, double factor, int num_threads);

namespace cuda {

// Scales by the Euclidean norm may differ from the CPU's in their last bits: another order of the sum.
void quantize(const Buffer& x, const Quantization& config, const int64_t* seed, float* scales, uint8_t* codes,
              float* remainder, Stream stream);
int64_t dequantize_workspace_bytes(size_t num_contributions);
void dequantize(const std::vector<const float*>& scales, const std::vector<const uint8_t*>& codes,
                const Quantization& config, const Buffer& out, Scale factor, Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
