// One vector of floats per instruction set, behind the same few names:
//   kLanes, load(p), load_partial(p, n), store(p, v), store_partial(p, v, n), stream(p, v) for float, F16 and BF16;
//   splat, add, sub, mul, quotient, root, minimum/maximum (NaN wins), magnitude, with_sign, Finite (a running
//   "all below this limit"), Squares (32 running sums, in double, of the squares of kSquaredGroup vectors at a time);
//   sign_bits and not_at_most (of magnitudes; true for NaN), lane i in bit i; negated_where(v, word, part), lane i
//   where bit part * kLanes + i of the word is set; lesser (minimum that may lose NaN), opposed (with the other sign
//   than the second operand has), fused (a * b + c, where a * b is exact), where_negative(sign, a, b) (of each lane
//   a where sign's bit is set, else b); of lanes as uint32: splat_bits, and_bits, or_bits, add_bits, sub_bits,
//   greater_bits, greatest (of all lanes), shift_down; of lanes as int32, whole numbers below 2^22: whole (a float, to
//   the nearest, ties to even), down (to zero), as_float, lesser_whole, greater_whole, signed_like (one that is not
//   negative, with another's sign); store_codes (64 of those in kBits each), load_codes (kLanes of them), multiples (of
//   what load_codes read and multiplier_of made of a scale: their products, as floats) and load_fp8 (2 * kLanes codes,
//   as floats; E4M3 divided by 2^8).
// stream() requires p aligned to the bytes it writes. The loop and its tail use the same element function: the tail is
// a partial vector.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/dtype.h"
#include "base/half.h"
#include "kernels/quantization.h"

#if defined(PYCOMM_ISA_AVX512)
#include "kernels/cpu/loops/simd_avx512.h"
#elif defined(PYCOMM_ISA_AVX2)
#include "kernels/cpu/loops/simd_avx2.h"
#else
#include "kernels/cpu/loops/simd_baseline.h"
#endif

namespace pycomm::PYCOMM_ISA {

inline constexpr int kSquaredGroup = 32 / kLanes;

// The sum of 32 sums, which it overwrites.
inline double pairwise(double (&lanes)[32]) {
    for (int width = 16; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

inline double total(const Squares& sums) {
    double lanes[32];
    sums.store(lanes);
    return pairwise(lanes);
}

// How many of the `left` remaining elements belong to vector `u` of a group.
inline int64_t part_of(int64_t left, int u) {
    int64_t n = left - u * kLanes;
    return n < 0 ? 0 : n < kLanes ? n : kLanes;
}

// The smallest magnitude, as a float, that is written as inf: values are finite when they compare below it.
template <class T>
inline float overflow_limit();
template <>
inline float overflow_limit<float>() {
    return __builtin_inff();
}
template <>
inline float overflow_limit<F16>() {
    return 65520.0f;
}
template <>
inline float overflow_limit<BF16>() {
    return bits_float(0x7f7f8000u);
}

inline bool is_aligned(const void* pointer, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// How many elements precede the first cache line border at or after `pointer`; -1 if elements never meet one.
template <class T>
inline int64_t elements_before_line(const T* pointer) {
    if (!is_aligned(pointer, sizeof(T))) return -1;
    return static_cast<int64_t>(-reinterpret_cast<uintptr_t>(pointer) % 64 / sizeof(T));
}

// Prefetches what a stream of reads needs kDistance bytes from now: the hardware's own prefetcher stops at every page
// border, which costs a streaming copy 15 % (measured on Zen 4). Addresses past the end of the array are harmless.
template <int64_t kDistance = 1024, class T>
inline void prefetch_ahead(const T* next, int64_t count) {
    for (int64_t byte = 0; byte < count * static_cast<int64_t>(sizeof(T)); byte += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(next) + kDistance + byte, 0, 0);
    }
}

// A pass that only reads takes turns among kStreams stretches of the array: the hardware's prefetchers start again at
// every page, which one stream waits for (102 MB in 6.3 ms by one stream, 3.7 ms by four, measured on Zen 3; software
// prefetches, at any distance, make one stream slower there).
inline constexpr int kStreams = 4;
inline constexpr int64_t kStretch = 16384;  // elements of each stretch, at most

// prefetch_ahead for such a pass. Only with AVX-512: processors that lack it are those that it makes slower.
template <int64_t kDistance, class T>
inline void prefetch_stream(const T* next, int64_t count) {
#if defined(PYCOMM_ISA_AVX512)
    prefetch_ahead<kDistance>(next, count);
#else
    static_cast<void>(next);
    static_cast<void>(count);
#endif
}

// Elements of each of the next kStreams stretches where `left` are left: a multiple of kGroup; 0 if they are too few.
template <int64_t kGroup>
inline int64_t stretch_of(int64_t left) {
    int64_t whole = left / (kStreams * kGroup) * kGroup;
    return whole < kStretch ? whole : kStretch;
}

// Calls use(stream, g) for all but the last few of `groups` groups of elements, in turn for groups of kStreams
// stretches of `most` groups or fewer. Returns the number of the first one that is left.
template <class Use>
inline int64_t in_turn(int64_t groups, int64_t most, Use&& use) {
    int64_t first = 0;
    for (int64_t each; (each = (groups - first) / kStreams) > 0; first += kStreams * each) {
        if (each > most) each = most;
        for (int64_t g = first; g < first + each; ++g) {
            for (int s = 0; s < kStreams; ++s) use(s, g + s * each);
        }
    }
    return first;
}

// Calls f with a null pointer of the element type: a typed switch for templates.
template <class F>
inline auto with_float_type(DType dtype, F&& f) {
    switch (dtype) {
        case DType::kF16:
            return f(static_cast<F16*>(nullptr));
        case DType::kBF16:
            return f(static_cast<BF16*>(nullptr));
        default:
            return f(static_cast<float*>(nullptr));
    }
}

// Scalar element access for the types that have no vector here.
template <class T>
inline T load_element(const char* base, int64_t i) {
    T value;
    std::memcpy(&value, base + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
}
template <class T>
inline void store_element(char* base, int64_t i, T value) {
    std::memcpy(base + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

}  // namespace pycomm::PYCOMM_ISA
