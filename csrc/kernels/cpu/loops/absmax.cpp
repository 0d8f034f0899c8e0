#include "kernels/cpu/loops/members.h"
#include "kernels/cpu/loops/simd.h"

namespace pycomm::PYCOMM_ISA {
namespace {

template <class T>
float absmax_floats(const T* x, int64_t count) {
    constexpr int64_t kTwoVecs = 2 * kLanes;
    Vec largest[kStreams] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    int64_t i = kTwoVecs * in_turn(count / kTwoVecs, kStretch / kTwoVecs, [&](int s, int64_t g) {
                    for (int u = 0; u < 2; ++u) {
                        largest[s] = maximum(largest[s], magnitude(load(x + g * kTwoVecs + u * kLanes)));
                    }
                });
    for (int64_t n; i < count; i += n) {
        n = count - i < kLanes ? count - i : kLanes;
        largest[0] = maximum(largest[0], magnitude(load_partial(x + i, n)));
    }
    Vec all = maximum(maximum(largest[0], largest[1]), maximum(largest[2], largest[3]));
    float out = 0.0f;
    for (int j = 0; j < kLanes; ++j) {
        float v = lane(all, j);
        if (v != v) return v;
        out = v > out ? v : out;
    }
    return out;
}

float absmax_doubles(const char* x, int64_t count) {
    double out = 0.0;
    for (int64_t i = 0; i < count; ++i) {
        double v = __builtin_fabs(load_element<double>(x, i));
        if (v != v) return __builtin_nanf("");
        out = v > out ? v : out;
    }
    return static_cast<float>(out);
}

}  // namespace

float absmax(const void* x, DType dtype, int64_t count) {
    if (dtype == DType::kF64) return absmax_doubles(static_cast<const char*>(x), count);
    return with_float_type(dtype, [&](auto* t) {
        return absmax_floats(static_cast<const std::remove_pointer_t<decltype(t)>*>(x), count);
    });
}

}  // namespace pycomm::PYCOMM_ISA
