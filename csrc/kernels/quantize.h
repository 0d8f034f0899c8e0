// quantize, dequantize, requantize: floats as few bits, with a scale per block.
//
// Whole numbers (CodeType::kInt):
//   scale[b] = norm of block b / levels; the norm is the largest magnitude, or the Euclidean length, whose squares are
//           added as floats: it is inf where they overflow (from about 1e18 on) and 0 where they vanish (below 1e-22)
//   level = |x[i]| / scale, rounded: to the nearest, ties to even; or, stochastically, down or up so that the
//           expectation is exact. Never above `levels`.
//   code = level with x's sign, in two's complement of `bits` bits; element i at bit (i * bits) % 8 of byte
//           i * bits / 8
//   bits is 2, 4 or 8, levels < 2^(bits - 1).
//
// FP8 (CodeType::kE4M3, kE5M2; fp8.h). bits is 8, the norm the largest magnitude, and levels keeps its default:
//   scale[b] = the smallest power of two with norm / scale <= the largest finite number, 448 or 57344
//   code = x[i] / scale, rounded to a multiple of its mantissa's last bit (for subnormals the smallest one's): to the
//           nearest, ties to even; or stochastically as above. Never above the largest finite number: nothing is
//           saturated, as no |x[i]| / scale exceeds it, and no code of finite elements is an infinity or a NaN.
//   Division by the scale, and code * scale, are exact. An element above 1.75 * 2^127 counts as infinite, as rounding
//   could make it so.
//
// A block is `block` consecutive elements, a multiple of 64; the last may be shorter. A scale below 2^-100 is written
// as 0, and the codes of its block are 0. x is float32. A block with an element that is not finite gets a scale that is
// not finite either, and codes without a meaning.
//
// Random numbers follow from seed[0], seed[1] and i alone: they are the same everywhere, and no state is kept.
//
// With `remainder`, which may be x itself, remainder[i] = x[i] - code * scale, with that product as dequantize computes
// it: the second half of error feedback.
//
//   dequantize: out[i] = (sum over p of codes[p][i] * scales[p][b], in the order of p) * factor
//   requantize: quantizes that sum with a factor of 1; what rounding leaves over is added to `remainder`
//   accumulate_quantized: accumulate (accumulate.h), and then quantize with acc as x and remainder, for some parts of
//           acc, each as if it were alone. What is in no part is only accumulated. Without `keeps`, what is in acc at
//           the parts has no meaning. On a CPU one pass: a block is quantized while the fastest cache has it.
//
// Except for remainder and x, an output overlaps no other array of the call.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "kernels/accumulate.h"
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

// What requantize writes; remainder may be null.
struct Requantized {
    float* scales;
    uint8_t* codes;
    float* remainder;
};
void requantize(const std::vector<const float*>& scales, const std::vector<const uint8_t*>& codes, int64_t count,
                const Quantization& config, const int64_t* seed, const Requantized& out, int num_threads);

// Part of acc from element `begin` on, and where its scales and codes go.
struct QuantizedPart {
    int64_t begin, count;
    const int64_t* seed;
    float* scales;
    uint8_t* codes;
};
void accumulate_quantized(const Accumulation& job, double scale, bool* finite, const Quantization& config,
                          const std::vector<QuantizedPart>& parts, bool keeps, int num_threads);

namespace cuda {

// Scales by the Euclidean norm may differ from the CPU's in their last bits: another order of the sum.
void quantize(const Buffer& x, const Quantization& config, const int64_t* seed, float* scales, uint8_t* codes,
              float* remainder, Stream stream);
int64_t dequantize_workspace_bytes(size_t num_contributions);  // also for requantize
void dequantize(const std::vector<const float*>& scales, const std::vector<const uint8_t*>& codes,
                const Quantization& config, const Buffer& out, Scale factor, Workspace& workspace, Stream stream);
void requantize(const std::vector<const float*>& scales, const std::vector<const uint8_t*>& codes, int64_t count,
                const Quantization& config, const int64_t* seed, const Requantized& out, Workspace& workspace,
                Stream stream);

}  // namespace cuda
}  // namespace pycomm
