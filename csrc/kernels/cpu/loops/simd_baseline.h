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
inline Vec truncate(Vec a) {
    return map([&](int i) { return __builtin_truncf(a.lanes[i]); });
}
inline Vec with_sign(Vec magnitude_only, Vec sign) {
    return map([&](int i) { return __builtin_copysignf(magnitude_only.lanes[i], sign.lanes[i]); });
}
inline Vec load_bytes(const int8_t* p) {
    return map([&](int i) { return static_cast<float>(p[i]); });
}
inline void store_bytes(int8_t* p, Vec v) {  // whole numbers: the caller has rounded them
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(v.lanes[i]);
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
inline Vec negated_where(Vec v, uint32_t bits) {
    return map([&](int i) { return bits_float(float_bits(v.lanes[i]) ^ ((bits >> i & 1u) << 31)); });
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
