// Scalar conversions between float and the half types: round to nearest even, NaN stays NaN, subnormals kept.
// Branch-light bit arithmetic, so that a compiler may vectorize it where no instruction exists.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/dtype.h"

namespace pycomm {

static inline uint32_t float_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float bits_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float to_float(BF16 half) { return bits_float(static_cast<uint32_t>(half.bits) << 16); }

static inline BF16 to_bf16(float value) {
    uint32_t bits = float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

static inline float to_float(F16 half) {
    uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
    uint32_t magnitude = half.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) {  // inf, NaN (quieted, as the hardware does)
        uint32_t quiet = magnitude > 0x7c00u ? 0x00400000u : 0u;
        return bits_float(sign | 0x7f800000u | quiet | (magnitude & 0x3ffu) << 13);
    }
    // Exact for subnormals too: the half's exponent and mantissa read as a float are 2^-112 of its value.
    float scaled = bits_float(magnitude << 13) * 0x1p112f;
    return bits_float(sign | float_bits(scaled));
}

static inline F16 to_f16(float value) {
    uint32_t bits = float_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and above round to inf
    if (magnitude < 0x38800000u) {                                                 // below 2^-14: subnormal half
        // Adding 0.5 shifts the mantissa so that the float adder does the rounding at 2^-24.
        float shifted = bits_float(magnitude) + 0.5f;
        return {static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3f000000u))};
    }
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

}  // namespace pycomm
