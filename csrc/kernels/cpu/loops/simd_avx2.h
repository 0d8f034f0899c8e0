// AVX2 + F16C + FMA: eight floats. Partial vectors go through a small buffer.
#pragma once

#include <immintrin.h>

namespace pycomm::PYCOMM_ISA {

inline constexpr int kLanes = 8;
using Vec = __m256;

inline Vec widen(const BF16*, __m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Vec widen(const F16*, __m128i bits) { return _mm256_cvtph_ps(bits); }

inline __m128i narrow(const F16*, Vec v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline __m128i narrow(const BF16*, Vec v) {
    __m256i bits = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    __m256i packed = _mm256_packus_epi32(high, high);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline void stream(float* p, Vec v) { _mm256_stream_ps(p, v); }

template <class Half>
inline Vec load(const Half* p) {
    return widen(p, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
template <class Half>
inline void store(Half* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(p, v));
}
template <class Half>
inline void stream(Half* p, Vec v) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrow(p, v));
}

template <class T>
inline Vec load_partial(const T* p, int64_t n) {
    T lanes[kLanes] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(T));
    return load(lanes);
}
template <class T>
inline void store_partial(T* p, Vec v, int64_t n) {
    T lanes[kLanes];
    store(lanes, v);
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(T));
}

inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec magnitude(Vec a) { return _mm256_andnot_ps(splat(-0.0f), a); }
inline Vec keep_nan(Vec a, Vec chosen) { return _mm256_blendv_ps(chosen, a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
// min_ps and max_ps return their second operand when either is NaN, so b's NaN survives; a's is put back.
inline Vec minimum(Vec a, Vec b) { return keep_nan(a, _mm256_min_ps(a, b)); }
inline Vec maximum(Vec a, Vec b) { return keep_nan(a, _mm256_max_ps(a, b)); }
inline float lane(Vec v, int i) {
    float lanes[kLanes];
    store(lanes, v);
    return lanes[i];
}
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec quotient(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec root(Vec a) { return _mm256_sqrt_ps(a); }
inline Vec with_sign(Vec magnitude_only, Vec sign) {
    return _mm256_or_ps(magnitude_only, _mm256_and_ps(sign, splat(-0.0f)));
}
inline Vec opposed(Vec magnitude_only, Vec sign) {
    return _mm256_or_ps(magnitude_only, _mm256_andnot_ps(sign, splat(-0.0f)));
}
inline Vec fused(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec lesser(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline __m256i bits_of(Vec a) { return _mm256_castps_si256(a); }
inline Vec from_bits(__m256i bits) { return _mm256_castsi256_ps(bits); }
inline Vec splat_bits(uint32_t bits) { return from_bits(_mm256_set1_epi32(static_cast<int>(bits))); }
inline Vec and_bits(Vec a, Vec b) { return _mm256_and_ps(a, b); }
inline Vec add_bits(Vec a, Vec b) { return from_bits(_mm256_add_epi32(bits_of(a), bits_of(b))); }
inline Vec sub_bits(Vec a, Vec b) { return from_bits(_mm256_sub_epi32(bits_of(a), bits_of(b))); }
inline Vec greater_bits(Vec a, Vec b) { return from_bits(_mm256_max_epu32(bits_of(a), bits_of(b))); }
inline float greatest(Vec a) {
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(bits_of(a)), _mm256_extracti128_si256(bits_of(a), 1));
    __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1))));
}
template <int kBy>
inline Vec shift_down(Vec a) {
    return from_bits(_mm256_srli_epi32(bits_of(a), kBy));
}
inline Vec or_bits(Vec a, Vec b) { return _mm256_or_ps(a, b); }
inline Vec where_negative(Vec sign, Vec a, Vec b) { return _mm256_blendv_ps(b, a, sign); }
inline Vec whole(Vec v) { return from_bits(_mm256_cvtps_epi32(v)); }
inline Vec down(Vec v) { return from_bits(_mm256_cvttps_epi32(v)); }
inline Vec as_float(Vec v) { return _mm256_cvtepi32_ps(bits_of(v)); }
inline Vec lesser_whole(Vec a, Vec b) { return from_bits(_mm256_min_epi32(bits_of(a), bits_of(b))); }
inline Vec greater_whole(Vec a, Vec b) { return from_bits(_mm256_max_epi32(bits_of(a), bits_of(b))); }
inline Vec signed_like(Vec v, Vec sign) { return from_bits(_mm256_sign_epi32(bits_of(v), bits_of(sign))); }

// The lowest bytes of 32 numbers as int32, in fours: elements 0-3, 8-11, 16-19, 24-27, then the others.
inline __m256i as_bytes(const Vec* v) {
    __m256i low = _mm256_packs_epi32(bits_of(v[0]), bits_of(v[1]));
    return _mm256_packs_epi16(low, _mm256_packs_epi32(bits_of(v[2]), bits_of(v[3])));
}
template <int kBits>
inline void store_codes(uint8_t* p, const Vec (&v)[8]) {
    auto to = reinterpret_cast<__m256i*>(p);
    __m256i first = as_bytes(v), second = as_bytes(v + 4);
    if constexpr (kBits == 8) {
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256(to, _mm256_permutevar8x32_epi32(first, order));
        _mm256_storeu_si256(to + 1, _mm256_permutevar8x32_epi32(second, order));
        return;
    }
    constexpr int kPair = (1 << kBits) % 256;
    // Numbers become digits, and neighbors are put together: a pair in 16 bits, then, of 2 bits, a pair of pairs
    // in 32.
    const __m256i digit = _mm256_set1_epi8((1 << kBits) - 1), pair = _mm256_set1_epi16(1 | kPair << 8);
    first = _mm256_maddubs_epi16(_mm256_and_si256(first, digit), pair);
    second = _mm256_maddubs_epi16(_mm256_and_si256(second, digit), pair);
    if constexpr (kBits == 4) {
        const __m128i by_two = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
        __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xd8);
        _mm256_storeu_si256(to, _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(by_two)));
    } else {
        const __m256i quad = _mm256_set1_epi32(1 | 1 << 20);
        __m256i words = _mm256_packs_epi32(_mm256_madd_epi16(first, quad), _mm256_madd_epi16(second, quad));
        __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0xd8);
        const __m128i by_one = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shuffle_epi8(_mm256_castsi256_si128(bytes), by_one));
    }
}
template <int kBits>
inline Vec multiplier_of(float scale) {
    if constexpr (kBits == 2) {
        return _mm256_mul_ps(_mm256_setr_ps(0.0f, 1.0f, -2.0f, -1.0f, 0.0f, 1.0f, -2.0f, -1.0f), splat(scale));
    } else {
        return splat(scale);
    }
}
// Of fewer bits than 8, each lane gets all codes. Of 4 bits it shifts its own one to the top: shifting down extends the
// sign. Of 2 bits it shifts its own one to the bottom, which is the number of its product.
template <int kBits>
inline Vec load_codes(const uint8_t* p) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    if constexpr (kBits == 8) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
    } else {
        int32_t all = 0;
        __builtin_memcpy(&all, p, kBits);
        const __m256i codes = _mm256_set1_epi32(all);
        if constexpr (kBits == 2) return from_bits(_mm256_srlv_epi32(codes, _mm256_slli_epi32(lanes, 1)));
        const __m256i up = _mm256_sub_epi32(_mm256_set1_epi32(28), _mm256_slli_epi32(lanes, 2));
        return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_sllv_epi32(codes, up), 28));
    }
}
template <int kBits>
inline Vec multiples(Vec codes, Vec multiplier) {
    return kBits == 2 ? _mm256_permutevar_ps(multiplier, bits_of(codes)) : mul(codes, multiplier);
}
// An E5M2 is the upper half of a float16, an E4M3 2^8 times one with the same mantissa and exponent, which is read.
template <CodeType kElement>
inline void load_fp8(const uint8_t* p, Vec (&out)[2]) {
    __m256i halves = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    if constexpr (kElement == CodeType::kE5M2) {
        halves = _mm256_slli_epi16(halves, 8);
    } else {
        // A sign that was extended to 9 bits is at the top after the shift, and once more behind it.
        const __m256i rest = _mm256_set1_epi16(0x3f80), sign_and_rest = _mm256_set1_epi16(-0x4080);
        halves = _mm256_slli_epi16(halves, 7);
        __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(halves, rest), rest);
        halves = _mm256_or_si256(_mm256_and_si256(halves, sign_and_rest), is_nan);
    }
    out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}
inline uint32_t sign_bits(Vec v) { return static_cast<uint32_t>(_mm256_movemask_ps(v)); }
inline uint32_t not_at_most(Vec magnitudes, Vec limit) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(magnitudes, limit, _CMP_NLE_UQ)));
}
inline Vec negated_where(Vec v, uint32_t word, int part) {
    const __m256i up = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    const __m256i bits = _mm256_set1_epi32(static_cast<int>(word));
    const __m256i at_top = _mm256_sllv_epi32(bits, _mm256_sub_epi32(up, _mm256_set1_epi32(kLanes * part)));
    return where_negative(from_bits(at_top), _mm256_xor_ps(v, splat(-0.0f)), v);
}
inline void fence_streams() { _mm_sfence(); }

class Finite {
   public:
    explicit Finite(float limit) : limit_(splat(limit)), all_(_mm256_castsi256_ps(_mm256_set1_epi32(-1))) {}
    void check(Vec v) { all_ = _mm256_and_ps(all_, _mm256_cmp_ps(magnitude(v), limit_, _CMP_LT_OQ)); }
    bool all() const { return _mm256_movemask_ps(all_) == 0xff; }

   private:
    Vec limit_, all_;
};

class Squares {
   public:
    Squares() {
        for (__m256d& sum : sums_) sum = _mm256_setzero_pd();
    }
    void add(const Vec (&v)[4]) {
        for (int u = 0; u < 4; ++u) {
            add(sums_[2 * u], _mm256_castps256_ps128(v[u]));
            add(sums_[2 * u + 1], _mm256_extractf128_ps(v[u], 1));
        }
    }
    void store(double* lanes) const {
        for (int u = 0; u < 8; ++u) _mm256_storeu_pd(lanes + 4 * u, sums_[u]);
    }

   private:
    static void add(__m256d& sum, __m128 v) {
        __m256d wide = _mm256_cvtps_pd(v);
        sum = _mm256_add_pd(sum, _mm256_mul_pd(wide, wide));
    }
    __m256d sums_[8];
};

}  // namespace pycomm::PYCOMM_ISA
