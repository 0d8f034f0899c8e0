// AVX-512 F/BW/DQ/VL: sixteen floats.
#pragma once

#include <immintrin.h>

namespace pycomm::PYCOMM_ISA {

inline constexpr int kLanes = 16;
using Vec = __m512;

inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline Vec widen(const BF16*, __m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vec widen(const F16*, __m256i bits) { return _mm512_cvtph_ps(bits); }

inline __m256i narrow(const F16*, Vec v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline __m256i narrow(const BF16*, Vec v) {
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load_partial(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline void store_partial(float* p, Vec v, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
inline void stream(float* p, Vec v) { _mm512_stream_ps(p, v); }

template <class Half>
inline Vec load(const Half* p) {
    return widen(p, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
template <class Half>
inline Vec load_partial(const Half* p, int64_t n) {
    return widen(p, _mm256_maskz_loadu_epi16(first_lanes(n), p));
}
template <class Half>
inline void store(Half* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(p, v));
}
template <class Half>
inline void store_partial(Half* p, Vec v, int64_t n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(p, v));
}
template <class Half>
inline void stream(Half* p, Vec v) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow(p, v));
}

inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec magnitude(Vec a) { return _mm512_abs_ps(a); }
inline Vec keep_nan(Vec a, Vec chosen) { return _mm512_mask_mov_ps(chosen, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a); }
// min_ps and max_ps return their second operand when either is NaN, so b's NaN survives; a's is put back.
inline Vec minimum(Vec a, Vec b) { return keep_nan(a, _mm512_min_ps(a, b)); }
inline Vec maximum(Vec a, Vec b) { return keep_nan(a, _mm512_max_ps(a, b)); }
inline float lane(Vec v, int i) {
    alignas(64) float lanes[kLanes];
    _mm512_store_ps(lanes, v);
    return lanes[i];
}
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec quotient(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec root(Vec a) { return _mm512_sqrt_ps(a); }
inline Vec with_sign(Vec magnitude_only, Vec sign) {
    return _mm512_or_ps(magnitude_only, _mm512_and_ps(sign, splat(-0.0f)));
}
inline Vec opposed(Vec magnitude_only, Vec sign) {
    return _mm512_or_ps(magnitude_only, _mm512_andnot_ps(sign, splat(-0.0f)));
}
inline Vec fused(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec lesser(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline __m512i bits_of(Vec a) { return _mm512_castps_si512(a); }
inline Vec from_bits(__m512i bits) { return _mm512_castsi512_ps(bits); }
inline Vec splat_bits(uint32_t bits) { return from_bits(_mm512_set1_epi32(static_cast<int>(bits))); }
inline Vec and_bits(Vec a, Vec b) { return _mm512_and_ps(a, b); }
inline Vec add_bits(Vec a, Vec b) { return from_bits(_mm512_add_epi32(bits_of(a), bits_of(b))); }
inline Vec sub_bits(Vec a, Vec b) { return from_bits(_mm512_sub_epi32(bits_of(a), bits_of(b))); }
inline Vec greater_bits(Vec a, Vec b) { return from_bits(_mm512_max_epu32(bits_of(a), bits_of(b))); }
inline float greatest(Vec a) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(_mm512_reduce_max_epu32(bits_of(a))))));
}
template <int kBy>
inline Vec shift_down(Vec a) {
    return from_bits(_mm512_srli_epi32(bits_of(a), kBy));
}
inline Vec or_bits(Vec a, Vec b) { return _mm512_or_ps(a, b); }
inline Vec where_negative(Vec sign, Vec a, Vec b) {
    return _mm512_mask_mov_ps(b, _mm512_movepi32_mask(bits_of(sign)), a);
}
inline Vec whole(Vec v) { return from_bits(_mm512_cvtps_epi32(v)); }
inline Vec down(Vec v) { return from_bits(_mm512_cvttps_epi32(v)); }
inline Vec as_float(Vec v) { return _mm512_cvtepi32_ps(bits_of(v)); }
inline Vec lesser_whole(Vec a, Vec b) { return from_bits(_mm512_min_epi32(bits_of(a), bits_of(b))); }
inline Vec greater_whole(Vec a, Vec b) { return from_bits(_mm512_max_epi32(bits_of(a), bits_of(b))); }
inline Vec signed_like(Vec v, Vec sign) {
    const __mmask16 negative = _mm512_movepi32_mask(bits_of(sign));
    return from_bits(_mm512_mask_sub_epi32(bits_of(v), negative, _mm512_setzero_si512(), bits_of(v)));
}

template <int kBits>
inline void store_codes(uint8_t* p, const Vec (&v)[4]) {
    __m128i bytes[4];
    for (int u = 0; u < 4; ++u) bytes[u] = _mm512_cvtepi32_epi8(bits_of(v[u]));
    __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_setr_m128i(bytes[0], bytes[1])),
                                     _mm256_setr_m128i(bytes[2], bytes[3]), 1);
    if constexpr (kBits == 8) return _mm512_storeu_si512(p, all);
    constexpr int kPair = (1 << kBits) % 256;
    // Numbers become digits, and neighbors are put together: a pair in 16 bits, then, of 2 bits, a pair of pairs
    // in 32.
    const __m512i digit = _mm512_set1_epi8((1 << kBits) - 1), pair = _mm512_set1_epi16(1 | kPair << 8);
    all = _mm512_maddubs_epi16(_mm512_and_si512(all, digit), pair);
    if constexpr (kBits == 4) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(all));
    } else {
        all = _mm512_madd_epi16(all, _mm512_set1_epi32(1 | 1 << 20));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(all));
    }
}
template <int kBits>
inline Vec multiplier_of(float scale) {
    if constexpr (kBits == 2) {
        return _mm512_mul_ps(_mm512_broadcast_f32x4(_mm_setr_ps(0.0f, 1.0f, -2.0f, -1.0f)), splat(scale));
    } else {
        return splat(scale);
    }
}
// Of fewer bits than 8, each lane gets the 32 bits with its code. Of 4 bits it shifts its own one to the top: shifting
// down extends the sign. Of 2 bits it shifts its own one to the bottom, which is the number of its product.
template <int kBits>
inline Vec load_codes(const uint8_t* p) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if constexpr (kBits == 8) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    } else {
        int32_t all[2] = {};
        __builtin_memcpy(all, p, 2 * kBits);
        const __m512i codes = _mm512_mask_set1_epi32(_mm512_set1_epi32(all[0]), kBits == 4 ? 0xff00 : 0, all[1]);
        if constexpr (kBits == 2) return from_bits(_mm512_srlv_epi32(codes, _mm512_slli_epi32(lanes, 1)));
        const __m512i up = _mm512_slli_epi32(_mm512_andnot_si512(lanes, _mm512_set1_epi32(7)), 2);
        return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_sllv_epi32(codes, up), 28));
    }
}
template <int kBits>
inline Vec multiples(Vec codes, Vec multiplier) {
    return kBits == 2 ? _mm512_permutevar_ps(multiplier, bits_of(codes)) : mul(codes, multiplier);
}
// An E5M2 is the upper half of a float16, an E4M3 2^8 times one with the same mantissa and exponent, which is read.
template <CodeType kElement>
inline void load_fp8(const uint8_t* p, Vec (&out)[2]) {
    __m512i halves = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    if constexpr (kElement == CodeType::kE5M2) {
        halves = _mm512_slli_epi16(halves, 8);
    } else {
        // A sign that was extended to 9 bits is at the top after the shift, and once more behind it.
        const __m512i rest = _mm512_set1_epi16(0x3f80), sign_and_rest = _mm512_set1_epi16(-0x4080);
        halves = _mm512_slli_epi16(halves, 7);
        __mmask32 is_nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(halves, rest), rest);
        halves = _mm512_mask_mov_epi16(_mm512_and_si512(halves, sign_and_rest), is_nan, _mm512_set1_epi16(-1));
    }
    out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    out[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}
inline uint32_t sign_bits(Vec v) { return _mm512_movepi32_mask(_mm512_castps_si512(v)); }
inline uint32_t not_at_most(Vec magnitudes, Vec limit) { return _mm512_cmp_ps_mask(magnitudes, limit, _CMP_NLE_UQ); }
inline Vec negated_where(Vec v, uint32_t word, int part) {
    return _mm512_mask_xor_ps(v, static_cast<__mmask16>(word >> (kLanes * part)), v, splat(-0.0f));
}
inline void fence_streams() { _mm_sfence(); }

class Finite {
   public:
    explicit Finite(float limit) : limit_(splat(limit)) {}
    void check(Vec v) { all_ &= _mm512_cmp_ps_mask(magnitude(v), limit_, _CMP_LT_OQ); }
    bool all() const { return all_ == 0xffff; }

   private:
    Vec limit_;
    __mmask16 all_ = 0xffff;
};

class Squares {
   public:
    void add(const Vec (&v)[2]) {
        for (int u = 0; u < 2; ++u) {
            add(sums_[2 * u], _mm512_castps512_ps256(v[u]));
            add(sums_[2 * u + 1], _mm512_extractf32x8_ps(v[u], 1));
        }
    }
    void store(double* lanes) const {
        for (int u = 0; u < 4; ++u) _mm512_storeu_pd(lanes + 8 * u, sums_[u]);
    }

   private:
    static void add(__m512d& sum, __m256 v) {
        __m512d wide = _mm512_cvtps_pd(v);
        sum = _mm512_add_pd(sum, _mm512_mul_pd(wide, wide));
    }
    __m512d sums_[4] = {_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd()};
};

}  // namespace pycomm::PYCOMM_ISA
