#include "kernels/cpu/loops/members.h"
#include "kernels/cpu/loops/simd.h"

namespace pycomm::PYCOMM_ISA {
namespace {

// Prefetches a group of 32 a page before it is read, into all caches. prefetch_ahead bypasses them: in a pass that
// writes nothing, that takes four times as long if the array lies in the last-level cache, and half as long again if it
// lies in memory (measured on Sapphire Rapids).
template <class T>
void prefetch_page_ahead(const T* next) {
    for (int64_t byte = 0; byte < 32 * static_cast<int64_t>(sizeof(T)); byte += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(next) + 4096 + byte, 0, 3);
    }
}

template <class T>
double squares_of_floats(const T* x, int64_t count) {
    Squares sums;
    Vec v[kSquaredGroup];
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        prefetch_page_ahead(x + i);
        for (int u = 0; u < kSquaredGroup; ++u) v[u] = load(x + i + u * kLanes);
        sums.add(v);
    }
    if (i < count) {
        for (int u = 0; u < kSquaredGroup; ++u) v[u] = load_partial(x + i + u * kLanes, part_of(count - i, u));
        sums.add(v);
    }
    return total(sums);
}

double squares_of_doubles(const char* x, int64_t count) {
    double lanes[32] = {};
    for (int64_t i = 0; i < count; ++i) {
        auto v = load_element<double>(x, i);
        lanes[i % 32] += v * v;
    }
    return pairwise(lanes);
}

}  // namespace

double squares(const void* x, DType dtype, int64_t count) {
    if (dtype == DType::kF64) return squares_of_doubles(static_cast<const char*>(x), count);
    return with_float_type(dtype, [&](auto* t) {
        return squares_of_floats(static_cast<const std::remove_pointer_t<decltype(t)>*>(x), count);
    });
}

}  // namespace pycomm::PYCOMM_ISA
