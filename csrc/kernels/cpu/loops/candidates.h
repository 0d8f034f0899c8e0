// Candidates of a selection out of a vector, which collect and accumulate append to their lists.
#pragma once

#include "kernels/cpu/loops/loops.h"
#include "kernels/cpu/loops/set_bits.h"
#include "kernels/cpu/loops/simd.h"

namespace pycomm::PYCOMM_ISA {

// put_candidates(out, v, hits, first): writes the lanes of v that `hits` names, lowest first, where there is room for
// kLanes candidates; returns how many those are. Lane 0 is element `first`. Nothing branches on `hits`.

#if defined(PYCOMM_ISA_AVX512)

// Compressed in a register and stored whole: compressing straight to memory is microcoded and many times slower on some
// processors.
inline int64_t put_candidates(Candidate* out, Vec v, uint32_t hits, uint32_t first) {
    const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i low_half = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high_half = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    auto mask = static_cast<__mmask16>(hits);
    __m512i bits = _mm512_maskz_compress_epi32(mask, _mm512_castps_si512(v));
    __m512i indices = _mm512_add_epi32(iota, _mm512_set1_epi32(static_cast<int>(first)));
    indices = _mm512_maskz_compress_epi32(mask, indices);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi32(bits, low_half, indices));
    _mm512_storeu_si512(out + 8, _mm512_permutex2var_epi32(bits, high_half, indices));
    return __builtin_popcount(hits);
}

#elif defined(PYCOMM_ISA_AVX2)

// AVX2 has no compress: the table says which lanes are kept.
inline int64_t put_candidates(Candidate* out, Vec v, uint32_t hits, uint32_t first) {
    __m256i lanes = set_bits_of(hits);
    __m256i bits = _mm256_permutevar8x32_epi32(_mm256_castps_si256(v), lanes);
    __m256i indices = _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(first)));
    __m256i low = _mm256_unpacklo_epi32(bits, indices), high = _mm256_unpackhi_epi32(bits, indices);
    auto to = reinterpret_cast<__m256i*>(out);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(low, high, 0x31));
    return __builtin_popcount(hits);
}

#else

inline int64_t put_candidates(Candidate* out, Vec v, uint32_t hits, uint32_t first) {
    int64_t found = 0;
    for (int i = 0; i < kLanes; ++i) {
        out[found] = {float_bits(v.lanes[i]), first + static_cast<uint32_t>(i)};
        found += hits >> i & 1u;
    }
    return found;
}

#endif

}  // namespace pycomm::PYCOMM_ISA
