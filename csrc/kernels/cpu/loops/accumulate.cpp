#include "kernels/cpu/loops/members.h"
#include "kernels/cpu/loops/simd.h"

namespace pycomm::PYCOMM_ISA {
namespace {

template <bool kHasResidual, class Grad>
bool accumulate_floats(float* acc, const float* residual, const Grad* grad, int64_t count, float scale) {
    const Vec factor = splat(scale);
    Finite finite(overflow_limit<float>());
    auto one = [&](Vec g, Vec r) {
        Vec v = mul(g, factor);
        if (kHasResidual) v = add(r, v);
        finite.check(v);
        return v;
    };
    int64_t i = 0;
    for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
        for (int u = 0; u < 4; ++u) {
            int64_t at = i + u * kLanes;
            store(acc + at, one(load(grad + at), kHasResidual ? load(residual + at) : splat(0.0f)));
        }
    }
    for (int64_t n; i < count; i += n) {
        n = count - i < kLanes ? count - i : kLanes;
        store_partial(acc + i,
                      one(load_partial(grad + i, n), kHasResidual ? load_partial(residual + i, n) : splat(0.0f)), n);
    }
    return finite.all();
}

bool accumulate_doubles(char* acc, const char* residual, const char* grad, int64_t count, double scale) {
    bool finite = true;
    for (int64_t i = 0; i < count; ++i) {
        double v = load_element<double>(grad, i) * scale;
        if (residual != nullptr) v = load_element<double>(residual, i) + v;
        store_element(acc, i, v);
        finite &= __builtin_fabs(v) < __builtin_inf();
    }
    return finite;
}

}  // namespace

bool accumulate(void* acc, const void* residual, DType acc_dtype, const void* grad, DType grad_dtype, int64_t count,
                double scale) {
    if (acc_dtype == DType::kF64) {
        return accumulate_doubles(static_cast<char*>(acc), static_cast<const char*>(residual),
                                  static_cast<const char*>(grad), count, scale);
    }
    float* out = static_cast<float*>(acc);
    const float* old = static_cast<const float*>(residual);
    float factor = static_cast<float>(scale);
    return with_float_type(grad_dtype, [&](auto* g) {
        const auto* from = static_cast<const std::remove_pointer_t<decltype(g)>*>(grad);
        return old == nullptr ? accumulate_floats<false>(out, old, from, count, factor)
                              : accumulate_floats<true>(out, old, from, count, factor);
    });
}

}  // namespace pycomm::PYCOMM_ISA
