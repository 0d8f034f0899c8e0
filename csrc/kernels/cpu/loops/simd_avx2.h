// AVX2 + F16C: eight floats. Partial vectors go through a small buffer.
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
// min_ps and max_ps return their second operand when either is NaN: b's NaN survives by itself, a's is put back.
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
inline Vec truncate(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
inline Vec with_sign(Vec magnitude_only, Vec sign) {
    return _mm256_or_ps(magnitude_only, _mm256_and_ps(sign, splat(-0.0f)));
}
inline Vec load_bytes(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store_bytes(int8_t* p, Vec v) {
    __m256i words = _mm256_cvtps_epi32(v);
    __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}
inline uint32_t sign_bits(Vec v) { return static_cast<uint32_t>(_mm256_movemask_ps(v)); }
inline uint32_t not_at_most(Vec magnitudes, Vec limit) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(magnitudes, limit, _CMP_NLE_UQ)));
}
inline Vec negated_where(Vec v, uint32_t bits) {
    const __m256i each = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
    __m256i chosen = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), each), each);
    return _mm256_xor_ps(v, _mm256_and_ps(_mm256_castsi256_ps(chosen), splat(-0.0f)));
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
