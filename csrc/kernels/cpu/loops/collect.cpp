#include "kernels/cpu/loops/members.h"
#include "kernels/cpu/loops/simd.h"

namespace pycomm::PYCOMM_ISA {

#if defined(PYCOMM_ISA_AVX512) || defined(PYCOMM_ISA_AVX2)
// Bytes: a pass that does next to nothing per element takes 20 to 30 % longer with a kilobyte (measured on Zen 4).
constexpr int64_t kDistance = 384;
#endif

#if defined(PYCOMM_ISA_AVX512)

// Four vectors are compared before anything branches: at a density of 0.1 % most groups have no hit at all. A hit is
// compressed in a register and stored whole; compressing straight to memory is microcoded and many times slower on
// some processors. Bits and index leave interleaved, so that a candidate is one 8-byte record.
int64_t collect(const float* x, int64_t count, uint32_t threshold, uint32_t first_index, Candidate* out,
                int64_t capacity, int64_t* num_collected) {
    const __m512i limit = _mm512_set1_epi32(static_cast<int>(threshold));
    const __m512i clear_sign = _mm512_set1_epi32(0x7fffffff);
    const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i low_half = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high_half = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    int64_t found = 0, i = 0;
    auto emit = [&](__m512i bits, __mmask16 hits, int64_t at) {
        if (hits == 0) return;
        __m512i indices = _mm512_add_epi32(iota, _mm512_set1_epi32(static_cast<int>(first_index + at)));
        bits = _mm512_maskz_compress_epi32(hits, bits);
        indices = _mm512_maskz_compress_epi32(hits, indices);
        _mm512_storeu_si512(out + found, _mm512_permutex2var_epi32(bits, low_half, indices));
        int num_hits = __builtin_popcount(hits);
        if (num_hits > 8) _mm512_storeu_si512(out + found + 8, _mm512_permutex2var_epi32(bits, high_half, indices));
        found += num_hits;
    };
    for (; i + 64 <= count && found + kCollectSlack <= capacity; i += 64) {
        __m512i bits[4];
        __mmask16 hits[4];
        prefetch_ahead<kDistance>(x + i, 64);
        for (int u = 0; u < 4; ++u) {
            bits[u] = _mm512_loadu_si512(x + i + 16 * u);
            hits[u] = _mm512_cmpgt_epu32_mask(_mm512_and_si512(bits[u], clear_sign), limit);
        }
        if ((hits[0] | hits[1] | hits[2] | hits[3]) == 0) continue;
        for (int u = 0; u < 4; ++u) emit(bits[u], hits[u], i + 16 * u);
    }
    while (i < count && found + kCollectSlack <= capacity) {
        int64_t n = count - i < 16 ? count - i : 16;
        __m512i bits = _mm512_maskz_loadu_epi32(first_lanes(n), x + i);
        emit(bits, _mm512_mask_cmpgt_epu32_mask(first_lanes(n), _mm512_and_si512(bits, clear_sign), limit), i);
        i += n;
    }
    *num_collected = found;
    return i;
}

#elif defined(PYCOMM_ISA_AVX2)

namespace {

// Row m: the numbers of the bits that are set in m, lowest first; what follows them is 0.
struct Compressions {
    uint8_t rows[256][8];
};

constexpr Compressions make_compressions() {
    Compressions table{};
    for (int mask = 0; mask < 256; ++mask) {
        int found = 0;
        for (int bit = 0; bit < 8; ++bit) {
            if (mask >> bit & 1) table.rows[mask][found++] = static_cast<uint8_t>(bit);
        }
    }
    return table;
}

constexpr Compressions kCompressions = make_compressions();

}  // namespace

// As above, in eights. AVX2 has no compress: a table of 2 KiB says which lanes a mask keeps.
int64_t collect(const float* x, int64_t count, uint32_t threshold, uint32_t first_index, Candidate* out,
                int64_t capacity, int64_t* num_collected) {
    const __m256i clear_sign = _mm256_set1_epi32(0x7fffffff);
    // Comparisons are signed. No key has its highest bit set, so nothing exceeds a threshold with that bit.
    const __m256i limit = _mm256_set1_epi32(static_cast<int>(threshold < 0x7fffffffu ? threshold : 0x7fffffffu));
    int64_t found = 0, i = 0;
    auto emit = [&](__m256i bits, __m256i hits, int64_t at) {
        auto mask = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(hits)));
        __m128i row = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kCompressions.rows[mask]));
        __m256i lanes = _mm256_cvtepu8_epi32(row);
        bits = _mm256_permutevar8x32_epi32(bits, lanes);
        __m256i indices = _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(first_index + at)));
        __m256i low = _mm256_unpacklo_epi32(bits, indices), high = _mm256_unpackhi_epi32(bits, indices);
        auto to = reinterpret_cast<__m256i*>(out + found);
        _mm256_storeu_si256(to, _mm256_permute2x128_si256(low, high, 0x20));
        _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(low, high, 0x31));
        found += __builtin_popcount(mask);
    };
    for (; i + 32 <= count && found + kCollectSlack <= capacity; i += 32) {
        __m256i bits[4], hits[4];
        prefetch_ahead<kDistance>(x + i, 32);
        for (int u = 0; u < 4; ++u) {
            bits[u] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + 8 * u));
            hits[u] = _mm256_cmpgt_epi32(_mm256_and_si256(bits[u], clear_sign), limit);
        }
        __m256i any = _mm256_or_si256(_mm256_or_si256(hits[0], hits[1]), _mm256_or_si256(hits[2], hits[3]));
        if (_mm256_testz_si256(any, any)) continue;
        for (int u = 0; u < 4; ++u) emit(bits[u], hits[u], i + 8 * u);
    }
    while (i < count && found + kCollectSlack <= capacity) {
        int64_t n = count - i < 8 ? count - i : 8;
        // Lanes beyond the end are zero, which exceeds nothing.
        __m256i bits = _mm256_castps_si256(load_partial(x + i, n));
        emit(bits, _mm256_cmpgt_epi32(_mm256_and_si256(bits, clear_sign), limit), i);
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
        uint32_t bits[kLook] = {};
        std::memcpy(bits, from + i * 4, static_cast<size_t>(n) * 4);
        uint32_t any = 0;  // vectorised by the compiler; most groups end here
        for (int64_t u = 0; u < kLook; ++u) any |= static_cast<uint32_t>((bits[u] & 0x7fffffffu) > threshold);
        if (any != 0) {
            for (int64_t u = 0; u < n; ++u) {
                out[found] = {bits[u], static_cast<uint32_t>(first_index + i + u)};
                found += (bits[u] & 0x7fffffffu) > threshold;
            }
        }
        i += n;
    }
    *num_collected = found;
    return i;
}

#endif

}  // namespace pycomm::PYCOMM_ISA
