// Positions of the bits that are set in a byte, as a vector.
#pragma once

#include <cstdint>

#if defined(PYCOMM_ISA_AVX512) || defined(PYCOMM_ISA_AVX2)

#include <immintrin.h>

namespace pycomm::PYCOMM_ISA {

// Row m: the numbers of the bits that are set in m, lowest first; what follows them is 0.
struct SetBits {
    uint8_t rows[256][8];
};

constexpr SetBits make_set_bits() {
    SetBits table{};
    for (int mask = 0; mask < 256; ++mask) {
        int found = 0;
        for (int bit = 0; bit < 8; ++bit) {
            if (mask >> bit & 1) table.rows[mask][found++] = static_cast<uint8_t>(bit);
        }
    }
    return table;
}

inline constexpr SetBits kSetBits = make_set_bits();

inline __m256i set_bits_of(uint32_t byte) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kSetBits.rows[byte])));
}

}  // namespace pycomm::PYCOMM_ISA

#endif
