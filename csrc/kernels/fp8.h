// FP8: the two formats of the "OCP 8-bit Floating Point Specification (OFP8)", revision 1.0, 2023.
//
// A code is a sign, an exponent and a mantissa, from the highest bit on. Exponent 0 holds 0 and the subnormals. E5M2
// has infinities and NaNs as IEEE's formats do; E4M3 has no infinity, and a NaN only where all of these bits are set.
#pragma once

#include <cstdint>

#include "kernels/quantization.h"
#include "kernels/random.h"

namespace pycomm {

struct Fp8 {
    int mantissa;     // bits
    int least, most;  // exponents of the smallest normal number and of the largest one
    float largest;    // 1.75 * 2^most, in both formats
};

PYCOMM_EVERYWHERE constexpr Fp8 fp8_of(CodeType element) {
    return element == CodeType::kE4M3 ? Fp8{3, -6, 8, 448.0f} : Fp8{2, -14, 15, 57344.0f};
}

// The bits of a block's scale, given the bits of its largest magnitude: the smallest power of two that brings it to the
// format's largest number or below. Zero for a scale below 2^-100. Inf and NaN stay, and what is above 1.75 * 2^127 is
// inf: rounding could make it 2^128.
PYCOMM_EVERYWHERE uint32_t fp8_scale(uint32_t norm, int most) {
    if (norm > 0x7f600000u) return norm < 0x7f800000u ? 0x7f800000u : norm;
    int exponent = static_cast<int>((norm + 0x1fffffu) >> 23) - most;  // of the next power of two if above 1.75
    return exponent < 127 - 100 ? 0 : static_cast<uint32_t>(exponent) << 23;
}

}  // namespace pycomm
