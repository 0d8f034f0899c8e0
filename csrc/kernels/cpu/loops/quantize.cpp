#include "kernels/cpu/loops/members.h"
#include "kernels/cpu/loops/simd.h"
#include "kernels/random.h"

namespace pycomm::PYCOMM_ISA {
namespace {

// Elements are processed 64 at a time: whole bytes at any number of bits. The last few are padded with zeros.
constexpr int kGroup = 64;
constexpr int kVecs = kGroup / kLanes;

// Uniform in [0, 1), for elements first ... first + 63.
inline void random_group(const Seed& seed, int64_t first, float* out) {
    for (int j = 0; j < kGroup; ++j) out[j] = uniform(seed, first + j);
}

// The codes of 64 elements in 64 bytes, and what is left of each.
template <bool kRandom>
inline void encode_group(const float* x, float inverse, float scale, int levels, const float* random, int8_t* codes,
                         float* remainder) {
    const Vec by = splat(inverse), most = splat(static_cast<float>(levels)), size = splat(scale);
    const Vec magic = splat(0x1.8p23f);  // adding and taking it away rounds to the nearest whole number, ties to even
    for (int u = 0; u < kVecs; ++u) {
        Vec v = load(x + u * kLanes);
        Vec level = magnitude(mul(v, by));
        if (kRandom) {
            level = truncate(add(level, load(random + u * kLanes)));
        } else {
            level = sub(add(level, magic), magic);
        }
        Vec code = with_sign(minimum(level, most), v);
        store_bytes(codes + u * kLanes, code);
        if (remainder != nullptr) store(remainder + u * kLanes, sub(v, mul(code, size)));
    }
}

inline void squeeze(const int8_t* codes, int bits, uint8_t* out) {
    if (bits == 4) {
        for (int j = 0; j < kGroup / 2; ++j) {
            out[j] = static_cast<uint8_t>((codes[2 * j] & 15) | (codes[2 * j + 1] & 15) << 4);
        }
    } else {
        for (int j = 0; j < kGroup / 4; ++j) {
            out[j] = static_cast<uint8_t>((codes[4 * j] & 3) | (codes[4 * j + 1] & 3) << 2 |
                                          (codes[4 * j + 2] & 3) << 4 | (codes[4 * j + 3] & 3) << 6);
        }
    }
}

inline void spread(const uint8_t* from, int bits, int8_t* codes) {
    const int per_byte = 8 / bits, rest = 8 - bits;
    for (int j = 0; j < kGroup; ++j) {
        int up = rest - (j % per_byte) * bits;
        codes[j] = static_cast<int8_t>(static_cast<int8_t>(static_cast<uint8_t>(from[j / per_byte] << up)) >> rest);
    }
}

// In an order that does not depend on the width of a vector.
inline float norm_of(const float* x, int64_t count, Norm norm) {
    constexpr int kSums = 16, kParts = kSums / kLanes;
    Vec sums[kParts];
    for (int u = 0; u < kParts; ++u) sums[u] = splat(0.0f);
    auto take = [&](int u, Vec v) {
        sums[u] = norm == Norm::kMax ? maximum(sums[u], magnitude(v)) : add(sums[u], mul(v, v));
    };
    int64_t i = 0;
    for (; i + kSums <= count; i += kSums) {
        for (int u = 0; u < kParts; ++u) take(u, load(x + i + u * kLanes));
    }
    for (int u = 0; u < kParts && i < count; ++u) {
        int64_t n = count - i < kLanes ? count - i : kLanes;
        take(u, load_partial(x + i, n));
        i += n;
    }
    float out = 0.0f;
    for (int j = 0; j < kSums; ++j) {
        float v = lane(sums[j / kLanes], j % kLanes);
        if (norm == Norm::kEuclidean) {
            out += v;
        } else {
            out = v != v || v > out ? v : out;
        }
    }
    return norm == Norm::kEuclidean ? __builtin_sqrtf(out) : out;
}

inline int64_t bytes_of(int bits, int64_t count) { return (count * bits + 7) / 8; }

template <bool kRandom>
void quantize_block(const float* x, int64_t count, int64_t first, const Quantization& config, const Seed& seed,
                    float scale, uint8_t* codes, float* remainder) {
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    for (int64_t i = 0; i < count; i += kGroup) {
        float random[kGroup];
        if (kRandom) random_group(seed, first + i, random);
        if (count - i >= kGroup && config.bits == 8) {
            encode_group<kRandom>(x + i, inverse, scale, config.levels, random, reinterpret_cast<int8_t*>(codes + i),
                                  remainder == nullptr ? nullptr : remainder + i);
            continue;
        }
        int64_t n = count - i < kGroup ? count - i : kGroup;
        float padded[kGroup] = {}, left[kGroup];
        int8_t wide[kGroup];
        uint8_t narrow_codes[kGroup];
        __builtin_memcpy(padded, x + i, static_cast<size_t>(n) * sizeof(float));
        encode_group<kRandom>(padded, inverse, scale, config.levels, random, wide, left);
        if (remainder != nullptr) __builtin_memcpy(remainder + i, left, static_cast<size_t>(n) * sizeof(float));
        if (config.bits == 8) {
            __builtin_memcpy(narrow_codes, wide, sizeof wide);
        } else {
            squeeze(wide, config.bits, narrow_codes);
        }
        __builtin_memcpy(codes + i * config.bits / 8, narrow_codes, static_cast<size_t>(bytes_of(config.bits, n)));
    }
}

}  // namespace

void quantize(const float* x, int64_t count, int64_t first, const Quantization& config, const int64_t* seed,
              float* scales, uint8_t* codes, float* remainder) {
    Seed numbers = {};
    if (seed != nullptr) numbers = mixed(seed);
    const float share = 1.0f / static_cast<float>(config.levels);
    for (int64_t begin = 0; begin < count; begin += config.block) {
        int64_t n = count - begin < config.block ? count - begin : config.block;
        float scale = norm_of(x + begin, n, config.norm) * share;
        if (scale < kSmallestScale) scale = 0.0f;
        __builtin_memcpy(scales + begin / config.block, &scale, sizeof scale);
        uint8_t* to = codes + begin * config.bits / 8;
        float* left = remainder == nullptr ? nullptr : remainder + begin;
        if (seed != nullptr) {
            quantize_block<true>(x + begin, n, first + begin, config, numbers, scale, to, left);
        } else {
            quantize_block<false>(x + begin, n, first + begin, config, numbers, scale, to, left);
        }
    }
}

void dequantize(const float* const* scales, const uint8_t* const* codes, int num_contributions,
                const Quantization& config, float* out, int64_t count, float factor) {
    const Vec by = splat(factor);
    for (int64_t i = 0; i < count; i += kGroup) {
        int64_t n = count - i < kGroup ? count - i : kGroup;
        Vec sums[kVecs];
        for (int u = 0; u < kVecs; ++u) sums[u] = splat(0.0f);
        for (int p = 0; p < num_contributions; ++p) {
            const Vec scale = splat(scales[p][i / config.block]);
            const uint8_t* from = codes[p] + i * config.bits / 8;
            int8_t wide[kGroup] = {};
            const int8_t* all = wide;
            if (config.bits == 8 && n == kGroup) {
                all = reinterpret_cast<const int8_t*>(from);
            } else if (config.bits == 8) {
                __builtin_memcpy(wide, from, static_cast<size_t>(n));
            } else {
                uint8_t narrow_codes[kGroup] = {};
                __builtin_memcpy(narrow_codes, from, static_cast<size_t>(bytes_of(config.bits, n)));
                spread(narrow_codes, config.bits, wide);
            }
            for (int u = 0; u < kVecs; ++u) sums[u] = add(sums[u], mul(load_bytes(all + u * kLanes), scale));
        }
        float padded[kGroup];
        float* to = n == kGroup ? out + i : padded;
        for (int u = 0; u < kVecs; ++u) store(to + u * kLanes, mul(sums[u], by));
        if (n < kGroup) __builtin_memcpy(out + i, padded, static_cast<size_t>(n) * sizeof(float));
    }
}

}  // namespace pycomm::PYCOMM_ISA
