#include "kernels/scatter_add.h"

#include <cstring>
#include <type_traits>

#include "base/error.h"
#include "base/half.h"

namespace pycomm {
namespace {

float widen(float x) { return x; }
double widen(double x) { return x; }
float widen(F16 x) { return to_float(x); }
float widen(BF16 x) { return to_float(x); }

template <class T, class Wide>
T narrow(Wide x) {
    if constexpr (std::is_same_v<T, F16>) return to_f16(static_cast<float>(x));
    if constexpr (std::is_same_v<T, BF16>) return to_bf16(static_cast<float>(x));
    if constexpr (std::is_arithmetic_v<T>) return static_cast<T>(x);
}

template <class T>
T load(const char* base, int64_t i) {
    T value;
    std::memcpy(&value, base + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
}

template <class Out, class Value>
void scatter(char* out, const char* indices, const char* values, int64_t count, double scale) {
    using Wide = std::conditional_t<std::is_same_v<Out, double> || std::is_same_v<Value, double>, double, float>;
    Wide factor = static_cast<Wide>(scale);
    for (int64_t j = 0; j < count; ++j) {
        int64_t i = load<int32_t>(indices, j);
        Wide term = static_cast<Wide>(widen(load<Value>(values, j))) * factor;
        Out sum = narrow<Out>(static_cast<Wide>(widen(load<Out>(out, i))) + term);
        std::memcpy(out + i * static_cast<int64_t>(sizeof(Out)), &sum, sizeof(Out));
    }
}

template <class F>
void with_type(DType dtype, F&& f) {
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

}  // namespace

void scatter_add(const Buffer& out, const int32_t* indices, const Buffer& values, double scale) {
    const char* raw = reinterpret_cast<const char*>(indices);
    for (int64_t j = 0; j < values.count; ++j) {
        int64_t i = load<int32_t>(raw, j);
        if (i < 0 || i >= out.count) {
            throw ArgumentError(format("indices[%lld] is %lld, wanted 0 <= index < %lld", static_cast<long long>(j),
                                       static_cast<long long>(i), static_cast<long long>(out.count)));
        }
    }
    with_type(out.dtype, [&](auto o) {
        with_type(values.dtype, [&](auto v) {
            scatter<decltype(o), decltype(v)>(out.bytes(), raw, values.bytes(), values.count, scale);
        });
    });
}

}  // namespace pycomm
