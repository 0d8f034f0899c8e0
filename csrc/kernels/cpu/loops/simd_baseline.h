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

}  // namespace pycomm::PYCOMM_ISA
