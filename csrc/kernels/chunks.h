// pack_chunks, unpack_chunks: the k largest elements of every chunk, with a few bits for each position and value.
//
// A chunk is `size` consecutive elements, a power of two; the last may be shorter, and has min(k, its size) entries.
// Selection is as in topk.h: by magnitude, ties to the lowest index, every NaN above inf. A chunk of n elements takes
// ChunkLayout(config, n).words 32-bit words, whatever they hold, bits counted from the least significant:
//   word 0: two magnitudes `low` and `high`, each the upper half of a float: low in bits 0-15, high in bits 16-31
//   from bit 32 on: bit (index >> layout.low) + m is set for entry m, counted by ascending index (Elias 1974)
//   then for every entry layout.low + bits bits: the lowest bits of its index, its level in bits - 1 bits, its sign
//
// Entry m stands for +-(low + level * step), step = (high - low) / (2^(bits - 1) - 1). Its level is the one nearest to
// its magnitude. With 2 bits, a level of 0 or 1, `low` and `high` are the mean of the magnitudes up to the mean of all,
// and of those above it: a Lloyd step, which one large element does not spoil. With 4 and 8 bits they are the smallest
// and the largest magnitude. Means are exact: of integers, magnitudes in units of 2^-23 of the power of two below the
// largest, rounded down. Both are then truncated to halves of floats.
//
// If no element of a chunk reaches 2^-100, low and high are 0. If one is not finite, both are NaN, and levels have no
// meaning. With `remainder`, which may be x itself, remainder[i] = (x[i] - what was packed of it) * decay.
//
//   accumulate_chunks: accumulate (accumulate.h), and then pack_chunks with acc as x and remainder. On a CPU one pass:
//   a
//           chunk is packed while a cache has it.
//   unpack_chunks: out[i] = (sum over p, in the order of p, of what words[p] have for i) * factor
//
// x, out and remainder are float32. Except for remainder and x, an output overlaps no other array of the call.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "kernels/accumulate.h"
#include "kernels/indices.h"
#include "kernels/on_device.h"
#include "kernels/quantization.h"

#if defined(__CUDACC__)
#define PYCOMM_CHUNK static __host__ __device__ inline
#else
#define PYCOMM_CHUNK static inline
#endif

namespace pycomm {

inline constexpr int64_t kMostChunk = 65536;  // elements

struct ChunkFormat {
    int64_t k, size;  // 1 <= k <= size <= kMostChunk
    int bits;         // 2, 4 or 8
};

struct ChunkLayout {
    int count, k, low, upper_bits, fields_at, words;  // fields_at: the first bit of those that entries have

    ChunkLayout(const ChunkFormat& config, int64_t n) : count(static_cast<int>(n)), k(0), low(0), upper_bits(0) {
        k = static_cast<int>(config.k < n ? config.k : n);
        if (k > 0) low = IndexLayout(n, k).low;
        if (k > 0) upper_bits = k + static_cast<int>((n - 1) >> low) + 1;
        fields_at = 32 + upper_bits;
        words = k == 0 ? 0 : (fields_at + k * (low + config.bits) + 31) / 32;
    }
};

// The layouts of all chunks of `count` elements.
struct ChunkLayouts {
    int64_t whole;  // number of whole chunks
    ChunkLayout each, last;

    ChunkLayouts(const ChunkFormat& config, int64_t count)
        : whole(count / config.size), each(config, config.size), last(config, count % config.size) {}
    int64_t num_chunks() const { return whole + (last.count > 0 ? 1 : 0); }
    int64_t num_words() const { return whole * each.words + last.words; }
};

// Magnitudes as integers; keys are their bits. `top` is the largest, finite and at least kSmallestScale.
PYCOMM_CHUNK uint32_t fixed_of(uint32_t key, uint32_t top) {
    uint32_t exponent = key >> 23, fraction = (key & 0x7fffffu) | (exponent == 0 ? 0 : 0x800000u);
    uint32_t down = (top >> 23) - (exponent == 0 ? 1 : exponent);
    return down > 31 ? 0 : fraction >> down;
}
// The bits of the float that an integer is multiplied by to be a magnitude again.
PYCOMM_CHUNK uint32_t unit_bits_of(uint32_t top) { return ((top >> 23) - 23) << 23; }

PYCOMM_CHUNK uint32_t chunk_word(uint32_t low_bits, uint32_t high_bits) {
    return low_bits >> 16 | (high_bits & 0xffff0000u);
}

inline constexpr uint32_t kNoFiniteWord = 0x7fc07fc0u;

// What entries of a chunk stand for.
struct ChunkLevels {
    float low, step, inverse, most;

    PYCOMM_CHUNK ChunkLevels of(float low, float high, int bits) {
        float most = static_cast<float>((1 << (bits - 1)) - 1), step = (high - low) / most;
        return {low, step, step == 0.0f ? 0.0f : 1.0f / step, most};
    }
};
PYCOMM_CHUNK int level_of(const ChunkLevels& levels, float magnitude) {
    // Adding and taking away rounds to the nearest whole number, ties to even. NaN becomes 0.
    float level = ((magnitude - levels.low) * levels.inverse + 0x1.8p23f) - 0x1.8p23f;
    return static_cast<int>(level > 0.0f ? (level < levels.most ? level : levels.most) : 0.0f);
}
PYCOMM_CHUNK float magnitude_of(const ChunkLevels& levels, int level) {
    return levels.low + static_cast<float>(level) * levels.step;
}

void pack_chunks(const Buffer& x, const ChunkFormat& config, uint32_t* words, float* remainder, float decay,
                 int num_threads);
void accumulate_chunks(const Accumulation& job, double scale, bool* finite, const ChunkFormat& config, uint32_t* words,
                       float decay, int num_threads);
// ArgumentError where pack_chunks cannot have made the words.
void unpack_chunks(const std::vector<const uint32_t*>& words, const ChunkFormat& config, const Buffer& out,
                   double factor, int num_threads);

namespace cuda {

// A mistake is reported as a fault instead of an ArgumentError, and `out` is then meaningless.
void pack_chunks(const Buffer& x, const ChunkFormat& config, uint32_t* words, float* remainder, float decay,
                 Stream stream);
int64_t unpack_chunks_workspace_bytes(size_t num_contributions);
void unpack_chunks(const std::vector<const uint32_t*>& words, const ChunkFormat& config, const Buffer& out,
                   Scale factor, Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
