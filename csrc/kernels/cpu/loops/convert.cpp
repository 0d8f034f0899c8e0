#include "kernels/cpu/loops/members.h"
#include "kernels/cpu/loops/simd.h"

namespace pycomm::PYCOMM_ISA {
namespace {

template <class Src, class Dst>
bool convert_floats(const Src* src, Dst* dst, int64_t count, float scale, float limit, Store mode) {
    const Vec factor = splat(scale);
    Finite finite(limit < overflow_limit<Dst>() ? limit : overflow_limit<Dst>());
    auto one = [&](Vec v) {
        v = mul(v, factor);
        finite.check(v);
        return v;
    };
    int64_t i = 0;
    int64_t head = mode == Store::kStreaming ? elements_before_line(dst) : -1;
    if (head >= 0 && head + 4 * kLanes <= count) {
        for (int64_t n; i < head; i += n) {
            n = head - i < kLanes ? head - i : kLanes;
            store_partial(dst + i, one(load_partial(src + i, n)), n);
        }
        for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
            prefetch_ahead(src + i, 4 * kLanes);
            for (int u = 0; u < 4; ++u) stream(dst + i + u * kLanes, one(load(src + i + u * kLanes)));
        }
        fence_streams();
    }
    for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
        for (int u = 0; u < 4; ++u) store(dst + i + u * kLanes, one(load(src + i + u * kLanes)));
    }
    for (int64_t n; i < count; i += n) {
        n = count - i < kLanes ? count - i : kLanes;
        store_partial(dst + i, one(load_partial(src + i, n)), n);
    }
    return finite.all();
}

inline double widen_element(double x) { return x; }
inline double widen_element(float x) { return x; }
inline double widen_element(F16 x) { return to_float(x); }
inline double widen_element(BF16 x) { return to_float(x); }
inline void narrow_element(double x, double* out) { *out = x; }
inline void narrow_element(double x, float* out) { *out = static_cast<float>(x); }
inline void narrow_element(double x, F16* out) { *out = to_f16(static_cast<float>(x)); }
inline void narrow_element(double x, BF16* out) { *out = to_bf16(static_cast<float>(x)); }

template <class Src, class Dst>
bool convert_doubles(const char* src, char* dst, int64_t count, double scale, double limit) {
    bool finite = true;
    for (int64_t i = 0; i < count; ++i) {
        Dst out;
        double wide = widen_element(load_element<Src>(src, i)) * scale;
        narrow_element(wide, &out);
        store_element(dst, i, out);
        finite &= __builtin_fabs(wide) < limit && __builtin_fabs(widen_element(out)) < __builtin_inf();
    }
    return finite;
}

// Bytes keep their values in float registers: nothing is computed.
int64_t stream_lines(const char* src, char* dst, int64_t num_bytes) {
    constexpr int64_t kStep = 4 * kLanes * static_cast<int64_t>(sizeof(float));
    int64_t i = 0;
    for (; i + kStep <= num_bytes; i += kStep) {
        auto from = reinterpret_cast<const float*>(src + i);
        auto to = reinterpret_cast<float*>(dst + i);
        for (int u = 0; u < 4; ++u) stream(to + u * kLanes, load(from + u * kLanes));
    }
    fence_streams();
    return i;
}

}  // namespace

void copy(const void* src, void* dst, int64_t num_bytes, Store mode) {
    const char* from = static_cast<const char*>(src);
    char* to = static_cast<char*>(dst);
    int64_t head = mode == Store::kStreaming ? elements_before_line(to) : -1;
    if (head >= 0 && head < num_bytes) {
        __builtin_memcpy(to, from, static_cast<size_t>(head));
        head += stream_lines(from + head, to + head, num_bytes - head);
        from += head;
        to += head;
        num_bytes -= head;
    }
    __builtin_memcpy(to, from, static_cast<size_t>(num_bytes));
}

bool convert(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t count, double scale, double limit,
             Store mode) {
    const char* from = static_cast<const char*>(src);
    char* to = static_cast<char*>(dst);
    if (src_dtype == DType::kF64 && dst_dtype == DType::kF64)
        return convert_doubles<double, double>(from, to, count, scale, limit);
    if (src_dtype == DType::kF64) {
        return with_float_type(dst_dtype, [&](auto* d) {
            return convert_doubles<double, std::remove_pointer_t<decltype(d)>>(from, to, count, scale, limit);
        });
    }
    if (dst_dtype == DType::kF64) {
        return with_float_type(src_dtype, [&](auto* s) {
            return convert_doubles<std::remove_pointer_t<decltype(s)>, double>(from, to, count, scale, limit);
        });
    }
    return with_float_type(src_dtype, [&](auto* s) {
        return with_float_type(dst_dtype, [&](auto* d) {
            using Src = std::remove_pointer_t<decltype(s)>;
            using Dst = std::remove_pointer_t<decltype(d)>;
            return convert_floats(static_cast<const Src*>(src), static_cast<Dst*>(dst), count,
                                  static_cast<float>(scale), static_cast<float>(limit), mode);
        });
    });
}

}  // namespace pycomm::PYCOMM_ISA
