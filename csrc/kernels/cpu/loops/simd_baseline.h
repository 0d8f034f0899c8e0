// No intrinsics: eight floats in an array, which a compiler turns into what the target always has (SSE2, NEON).
// This is the specification that the other instruction sets are compared with.
#pragma once

namespace pycomm::PYCOMM_ISA {

inline constexpr int kLanes = 8;
struct Vec {
    float lanes[kLanes];
};

template <class F>
inline Vec map(F&& f) {
    Vec out;
    for (int i = 0; i < kLanes; ++i) out.lanes[i] = f(i);
    return out;
}

inline float to_float(float x) { return x; }
inline float narrow(const float*, float x) { return x; }
inline F16 narrow(const F16*, float x) { return to_f16(x); }
inline BF16 narrow(const BF16*, float x) { return to_bf16(x); }
using pycomm::to_float;

template <class T>
inline Vec load_partial(const T* p, int64_t n) {
    T lanes[kLanes] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(T));
    return map([&](int i) { return to_float(lanes[i]); });
}
template <class T>
inline void store_partial(T* p, Vec v, int64_t n) {
    T lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = narrow(p, v.lanes[i]);
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(T));
}
template <class T>
inline Vec load(const T* p) {
    return load_partial(p, kLanes);
}
template <class T>
inline void store(T* p, Vec v) {
    store_partial(p, v, kLanes);
}
template <class T>
inline void stream(T* p, Vec v) {
    store(p, v);
}

inline Vec splat(float x) {
    return map([&](int) { return x; });
}
inline Vec add(Vec a, Vec b) {
    return map([&](int i) { return a.lanes[i] + b.lanes[i]; });
}
inline Vec mul(Vec a, Vec b) {
    return map([&](int i) { return a.lanes[i] * b.lanes[i]; });
}
inline Vec magnitude(Vec a) {
    return map([&](int i) { return __builtin_fabsf(a.lanes[i]); });
}
inline Vec minimum(Vec a, Vec b) {
    return map([&](int i) { return a.lanes[i] != a.lanes[i] || a.lanes[i] < b.lanes[i] ? a.lanes[i] : b.lanes[i]; });
}
inline Vec maximum(Vec a, Vec b) {
    return map([&](int i) { return a.lanes[i] != a.lanes[i] || a.lanes[i] > b.lanes[i] ? a.lanes[i] : b.lanes[i]; });
}
inline float lane(Vec v, int i) { return v.lanes[i]; }
inline Vec sub(Vec a, Vec b) {
    return map([&](int i) { return a.lanes[i] - b.lanes[i]; });
}
inline Vec quotient(Vec a, Vec b) {
    return map([&](int i) { return a.lanes[i] / b.lanes[i]; });
}
inline Vec root(Vec a) {
    return map([&](int i) { return __builtin_sqrtf(a.lanes[i]); });
}
inline Vec with_sign(Vec magnitude_only, Vec sign) {
    return map([&](int i) { return __builtin_copysignf(magnitude_only.lanes[i], sign.lanes[i]); });
}
inline Vec opposed(Vec magnitude_only, Vec sign) {
    return map([&](int i) { return __builtin_copysignf(magnitude_only.lanes[i], -sign.lanes[i]); });
}
inline Vec fused(Vec a, Vec b, Vec c) { return add(mul(a, b), c); }
inline Vec lesser(Vec a, Vec b) {
    return map([&](int i) { return a.lanes[i] < b.lanes[i] ? a.lanes[i] : b.lanes[i]; });
}
template <class F>
inline Vec map_bits(F&& f) {
    return map([&](int i) { return bits_float(f(i)); });
}
inline Vec splat_bits(uint32_t bits) { return splat(bits_float(bits)); }
inline Vec and_bits(Vec a, Vec b) {
    return map_bits([&](int i) { return float_bits(a.lanes[i]) & float_bits(b.lanes[i]); });
}
inline Vec add_bits(Vec a, Vec b) {
    return map_bits([&](int i) { return float_bits(a.lanes[i]) + float_bits(b.lanes[i]); });
}
inline Vec sub_bits(Vec a, Vec b) {
    return map_bits([&](int i) { return float_bits(a.lanes[i]) - float_bits(b.lanes[i]); });
}
inline Vec greater_bits(Vec a, Vec b) {
    return map_bits([&](int i) {
        uint32_t x = float_bits(a.lanes[i]), y = float_bits(b.lanes[i]);
        return x > y ? x : y;
    });
}
inline float greatest(Vec a) {
    uint32_t out = 0;
    for (int i = 0; i < kLanes; ++i) out = float_bits(a.lanes[i]) > out ? float_bits(a.lanes[i]) : out;
    return bits_float(out);
}
template <int kBy>
inline Vec shift_down(Vec a) {
    return map_bits([&](int i) { return float_bits(a.lanes[i]) >> kBy; });
}
inline Vec or_bits(Vec a, Vec b) {
    return map_bits([&](int i) { return float_bits(a.lanes[i]) | float_bits(b.lanes[i]); });
}
inline Vec where_negative(Vec sign, Vec a, Vec b) {
    return map([&](int i) { return float_bits(sign.lanes[i]) >> 31 != 0 ? a.lanes[i] : b.lanes[i]; });
}
inline int32_t whole_bits(float x) { return static_cast<int32_t>(float_bits(x)); }
template <class F>
inline Vec map_whole(F&& f) {
    return map_bits([&](int i) { return static_cast<uint32_t>(f(i)); });
}
// Adding so large a number rounds to the nearest whole one, ties to even.
inline Vec whole(Vec v) {
    constexpr float kMagic = 0x1.8p23f;
    return map_bits([&](int i) { return float_bits(v.lanes[i] + kMagic) - float_bits(kMagic); });
}
inline Vec down(Vec v) {
    return map_whole([&](int i) { return v.lanes[i] < 0x1p30f ? static_cast<int32_t>(v.lanes[i]) : 1 << 30; });
}
inline Vec as_float(Vec v) {
    return map([&](int i) { return static_cast<float>(whole_bits(v.lanes[i])); });
}
inline Vec lesser_whole(Vec a, Vec b) {
    return map([&](int i) { return whole_bits(a.lanes[i]) < whole_bits(b.lanes[i]) ? a.lanes[i] : b.lanes[i]; });
}
inline Vec greater_whole(Vec a, Vec b) {
    return map([&](int i) { return whole_bits(a.lanes[i]) > whole_bits(b.lanes[i]) ? a.lanes[i] : b.lanes[i]; });
}
inline Vec signed_like(Vec v, Vec sign) {
    return map_bits([&](int i) {
        return float_bits(sign.lanes[i]) >> 31 != 0 ? 0u - float_bits(v.lanes[i]) : float_bits(v.lanes[i]);
    });
}
template <int kBits>
inline void store_codes(uint8_t* p, const Vec (&whole_numbers)[64 / kLanes]) {
    constexpr int kPerByte = 8 / kBits;
    for (int byte = 0; byte < 64 / kPerByte; ++byte) {
        uint32_t joined = 0;
        for (int j = 0; j < kPerByte; ++j) {
            int i = byte * kPerByte + j;
            joined |= (float_bits(whole_numbers[i / kLanes].lanes[i % kLanes]) & ((1u << kBits) - 1u)) << (j * kBits);
        }
        p[byte] = static_cast<uint8_t>(joined);
    }
}
template <int kBits>
inline Vec multiplier_of(float scale) {
    return splat(scale);
}
template <int kBits>
inline Vec load_codes(const uint8_t* p) {
    return map([&](int i) {
        int up = 8 - kBits - i * kBits % 8;
        return static_cast<float>(static_cast<int8_t>(static_cast<uint8_t>(p[i * kBits / 8] << up)) >> (8 - kBits));
    });
}
template <int kBits>
inline Vec multiples(Vec codes, Vec multiplier) {
    return mul(codes, multiplier);
}
// An E5M2 is the upper half of a float16, an E4M3 2^8 times one with the same mantissa and exponent, which is read.
template <CodeType kElement>
inline void load_fp8(const uint8_t* p, Vec (&out)[2]) {
    auto value_of = [](uint8_t code) {
        if (kElement == CodeType::kE5M2) return to_float(F16{static_cast<uint16_t>(code << 8)});
        int sign = (code & 0x80) << 8, rest = code & 0x7f;
        return to_float(F16{static_cast<uint16_t>(rest == 0x7f ? 0x7fff : sign | rest << 7)});
    };
    for (int u = 0; u < 2; ++u) out[u] = map([&](int i) { return value_of(p[u * kLanes + i]); });
}
inline uint32_t sign_bits(Vec v) {
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= (float_bits(v.lanes[i]) >> 31) << i;
    return bits;
}
inline uint32_t not_at_most(Vec magnitudes, Vec limit) {
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(!(magnitudes.lanes[i] <= limit.lanes[i])) << i;
    return bits;
}
inline Vec negated_where(Vec v, uint32_t word, int part) {
    return map([&](int i) { return bits_float(float_bits(v.lanes[i]) ^ ((word >> (kLanes * part + i) & 1u) << 31)); });
}
inline void fence_streams() {}

class Finite {
   public:
    explicit Finite(float limit) : limit_(limit) {}
    void check(Vec v) {
        for (int i = 0; i < kLanes; ++i) all_ &= __builtin_fabsf(v.lanes[i]) < limit_;
    }
    bool all() const { return all_; }

   private:
    float limit_;
    bool all_ = true;
};

class Squares {
   public:
    void add(const Vec (&v)[4]) {
        for (int u = 0; u < 4; ++u) {
            for (int i = 0; i < kLanes; ++i) {
                double wide = v[u].lanes[i];
                sums_[kLanes * u + i] += wide * wide;
            }
        }
    }
    void store(double* lanes) const { std::memcpy(lanes, sums_, sizeof(sums_)); }

   private:
    double sums_[32] = {};
};

}  // namespace pycomm::PYCOMM_ISA
