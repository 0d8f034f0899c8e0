// Elements one by one: reading and writing them at any alignment, and converting them. For kernels that handle few
// elements; the others use loops/.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/dtype.h"
#include "base/half.h"

namespace pycomm {

template <class T>
T load_element(const char* base, int64_t i) {
    T value;
    std::memcpy(&value, base + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
}

template <class T>
void store_element(char* base, int64_t i, T value) {
    std::memcpy(base + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(F16 x) { return to_float(x); }
inline float widen(BF16 x) { return to_float(x); }

template <class To, class From>
To narrow(From x) {
    if constexpr (std::is_same_v<To, F16>) return to_f16(static_cast<float>(x));
    if constexpr (std::is_same_v<To, BF16>) return to_bf16(static_cast<float>(x));
    if constexpr (std::is_arithmetic_v<To>) return static_cast<To>(x);
}

// Calls f with a value of the floating element type.
template <class F>
void with_float_type(DType dtype, F&& f) {
    switch (dtype) {
        case DType::kF16:
            return f(F16{});
        case DType::kBF16:
            return f(BF16{});
        case DType::kF64:
            return f(double{});
        default:
            return f(float{});
    }
}

}  // namespace pycomm
