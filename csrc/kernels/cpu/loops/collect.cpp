#include "kernels/cpu/loops/members.h"
#include "kernels/cpu/loops/simd.h"

namespace pycomm::PYCOMM_ISA {

#if defined(PYCOMM_ISA_AVX512)

// Four vectors are compared before anything branches: at a density of 0.1 % most groups have no hit at all. A hit is
// compressed in a register and stored whole; compressing straight to memory is microcoded and many times slower on
// some processors. Key and index leave interleaved, so that a candidate is one 8-byte record.
int64_t collect(const float* x, int64_t count, uint32_t threshold, uint32_t first_index, Candidate* out,
                int64_t capacity, int64_t* num_collected) {
    const __m512i limit = _mm512_set1_epi32(static_cast<int>(threshold));
    const __m512i clear_sign = _mm512_set1_epi32(0x7fffffff);
    const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i low_half = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high_half = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    int64_t found = 0, i = 0;
    auto emit = [&](__m512i keys, __mmask16 hits, int64_t at) {
        if (hits == 0) return;
        __m512i indices = _mm512_add_epi32(iota, _mm512_set1_epi32(static_cast<int>(first_index + at)));
        keys = _mm512_maskz_compress_epi32(hits, keys);
        indices = _mm512_maskz_compress_epi32(hits, indices);
        _mm512_storeu_si512(out + found, _mm512_permutex2var_epi32(keys, low_half, indices));
        int num_hits = __builtin_popcount(hits);
        if (num_hits > 8) _mm512_storeu_si512(out + found + 8, _mm512_permutex2var_epi32(keys, high_half, indices));
        found += num_hits;
    };
    for (; i + 64 <= count && found + kCollectSlack <= capacity; i += 64) {
        __m512i keys[4];
        __mmask16 hits[4];
        for (int u = 0; u < 4; ++u) {
            keys[u] = _mm512_and_si512(_mm512_loadu_si512(x + i + 16 * u), clear_sign);
            hits[u] = _mm512_cmpgt_epu32_mask(keys[u], limit);
        }
        if ((hits[0] | hits[1] | hits[2] | hits[3]) == 0) continue;
        for (int u = 0; u < 4; ++u) emit(keys[u], hits[u], i + 16 * u);
    }
    while (i < count && found + kCollectSlack <= capacity) {
        int64_t n = count - i < 16 ? count - i : 16;
        __m512i keys = _mm512_and_si512(_mm512_maskz_loadu_epi32(first_lanes(n), x + i), clear_sign);
        emit(keys, _mm512_mask_cmpgt_epu32_mask(first_lanes(n), keys, limit), i);
        i += n;
    }
    *num_collected = found;
    return i;
}

#else

int64_t collect(const float* x, int64_t count, uint32_t threshold, uint32_t first_index, Candidate* out,
                int64_t capacity, int64_t* num_collected) {
    const char* from = reinterpret_cast<const char*>(x);
    constexpr int64_t kLook = 32;
    int64_t found = 0, i = 0;
    while (i < count && found + kCollectSlack <= capacity) {
        int64_t n = count - i < kLook ? count - i : kLook;
        uint32_t keys[kLook] = {};
        std::memcpy(keys, from + i * 4, static_cast<size_t>(n) * 4);
        uint32_t any = 0;  // vectorised by the compiler; most groups end here
        for (int64_t u = 0; u < kLook; ++u) {
            keys[u] &= 0x7fffffffu;
            any |= static_cast<uint32_t>(keys[u] > threshold);
        }
        if (any != 0) {
            for (int64_t u = 0; u < n; ++u) {
                out[found] = {keys[u], static_cast<uint32_t>(first_index + i + u)};
                found += keys[u] > threshold;
            }
        }
        i += n;
    }
    *num_collected = found;
    return i;
}

#endif

}  // namespace pycomm::PYCOMM_ISA
