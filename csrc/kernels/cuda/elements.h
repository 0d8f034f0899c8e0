// Elements: reading, writing and converting them, one by one and 16 bytes at a time.
//
// A loop over packets of 16 bytes and its scalar ends share one element function, so that they cannot differ.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/dtype.h"
#include "device/intrinsics.h"
#include "kernels/on_device.h"

namespace pycomm::cuda {

// The type that T is computed in.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <class A, class B>
using WiderOf = std::conditional_t<std::is_same_v<A, double> || std::is_same_v<B, double>, double, float>;

PYCOMM_DEVICE float widen(float x) { return x; }
PYCOMM_DEVICE double widen(double x) { return x; }
PYCOMM_DEVICE float widen(F16 x) { return device::to_float(x); }
PYCOMM_DEVICE float widen(BF16 x) { return device::to_float(x); }

template <class T, class From>
PYCOMM_DEVICE T narrow(From x) {
    if constexpr (std::is_same_v<T, F16>) {
        return device::to_f16(static_cast<float>(x));
    } else if constexpr (std::is_same_v<T, BF16>) {
        return device::to_bf16(static_cast<float>(x));
    } else {
        return static_cast<T>(x);
    }
}

PYCOMM_DEVICE bool is_finite(float x) { return (device::bits_of(x) & 0x7f800000u) != 0x7f800000u; }
PYCOMM_DEVICE bool is_finite(double x) { return x - x == 0.0; }
PYCOMM_DEVICE bool is_finite(F16 x) { return (x.bits & 0x7c00u) != 0x7c00u; }
PYCOMM_DEVICE bool is_finite(BF16 x) { return (x.bits & 0x7f80u) != 0x7f80u; }

template <class T>
PYCOMM_DEVICE T factor_of(const Scale& scale) {
    double factor = scale.value;
    if (scale.on_device != nullptr) factor *= static_cast<double>(*scale.on_device);
    if (scale.divisor != nullptr) factor /= static_cast<double>(*scale.divisor);
    return static_cast<T>(factor);
}

template <class T>
PYCOMM_DEVICE T load_element(const char* base, int64_t i) {
    const char* from = base + i * static_cast<int64_t>(sizeof(T));
    if (reinterpret_cast<uintptr_t>(from) % alignof(T) == 0) return *reinterpret_cast<const T*>(from);
    T out;
    for (size_t byte = 0; byte < sizeof(T); ++byte) reinterpret_cast<char*>(&out)[byte] = from[byte];
    return out;
}

template <class T>
PYCOMM_DEVICE void store_element(char* base, int64_t i, T value) {
    char* to = base + i * static_cast<int64_t>(sizeof(T));
    if (reinterpret_cast<uintptr_t>(to) % alignof(T) == 0) {
        *reinterpret_cast<T*>(to) = value;
        return;
    }
    for (size_t byte = 0; byte < sizeof(T); ++byte) to[byte] = reinterpret_cast<const char*>(&value)[byte];
}

// kCount elements that move in one access.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Packet {
    T values[kCount];
};

// Elements [i, i + kCount), in one access where they lie so that they can move in one.
template <class T, int kCount>
PYCOMM_DEVICE Packet<T, kCount> load_packet(const char* base, int64_t i) {
    const char* from = base + i * static_cast<int64_t>(sizeof(T));
    if (reinterpret_cast<uintptr_t>(from) % sizeof(Packet<T, kCount>) == 0) {
        return *reinterpret_cast<const Packet<T, kCount>*>(from);
    }
    Packet<T, kCount> out;
#pragma unroll
    for (int e = 0; e < kCount; ++e) out.values[e] = load_element<T>(base, i + e);
    return out;
}

template <class T, int kCount>
PYCOMM_DEVICE void store_packet(char* base, int64_t i, const Packet<T, kCount>& packet) {
    char* to = base + i * static_cast<int64_t>(sizeof(T));
    if (reinterpret_cast<uintptr_t>(to) % sizeof(Packet<T, kCount>) == 0) {
        *reinterpret_cast<Packet<T, kCount>*>(to) = packet;
        return;
    }
#pragma unroll
    for (int e = 0; e < kCount; ++e) store_element(base, i + e, packet.values[e]);
}

// How many elements precede the first place where arrays that hold Ts stand at a packet's border; never negative.
// `misfit` becomes true when T elements at `pointer` never do together with the others.
template <class T, int kCount>
PYCOMM_DEVICE void align(const void* pointer, int64_t& head, bool& misfit) {
    auto address = reinterpret_cast<uintptr_t>(pointer);
    if (address % sizeof(T) != 0) {
        misfit = true;
        return;
    }
    auto needed = static_cast<int64_t>((kCount - address / sizeof(T) % kCount) % kCount);
    misfit = misfit || (head >= 0 && head != needed);
    head = needed;
}

// The share of the work that a thread does: every `stride`-th item from `first` on.
struct Share {
    int first;
    int stride;
};

// dst[i] = cast(src[i] * scale) for i < count; returns whether this thread's share of what was written is finite, and
// of the products below `limit` in magnitude.
template <class Src, class Dst>
PYCOMM_DEVICE bool convert_segment(const char* src, char* dst, int64_t count, WiderOf<Src, Dst> scale,
                                   WiderOf<Src, Dst> limit, Share share) {
    constexpr int kCount = 16 / (sizeof(Src) > sizeof(Dst) ? sizeof(Src) : sizeof(Dst));
    constexpr int kUnroll = 4;
    bool finite = true;
    auto one = [&](Src x) {
        WiderOf<Src, Dst> wide = static_cast<WiderOf<Src, Dst>>(widen(x)) * scale;
        Dst y = narrow<Dst>(wide);
        finite = finite && is_finite(y) && wide < limit && -wide < limit;
        return y;
    };
    int64_t head = -1;
    bool misfit = false;
    align<Src, kCount>(src, head, misfit);
    align<Dst, kCount>(dst, head, misfit);
    if (misfit || head > count) head = count;
    for (int64_t i = share.first; i < head; i += share.stride) store_element(dst, i, one(load_element<Src>(src, i)));
    int64_t packets = (count - head) / kCount;
    auto from = reinterpret_cast<const Packet<Src, kCount>*>(src + head * static_cast<int64_t>(sizeof(Src)));
    auto to = reinterpret_cast<Packet<Dst, kCount>*>(dst + head * static_cast<int64_t>(sizeof(Dst)));
    for (int64_t i = share.first; i < packets; i += kUnroll * share.stride) {
        Packet<Src, kCount> in[kUnroll] = {};  // all loads first, so that they are under way together
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            if (i + u * share.stride < packets) in[u] = from[i + u * share.stride];
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            if (i + u * share.stride >= packets) break;
            Packet<Dst, kCount> out;
#pragma unroll
            for (int e = 0; e < kCount; ++e) out.values[e] = one(in[u].values[e]);
            to[i + u * share.stride] = out;
        }
    }
    for (int64_t i = head + packets * kCount + share.first; i < count; i += share.stride) {
        store_element(dst, i, one(load_element<Src>(src, i)));
    }
    return finite;
}

// Calls f with a null pointer of the floating element type: in kernels, and in launchers, whose f is for the host alone
// (which the compiler would otherwise complain of).
#pragma nv_exec_check_disable
template <class F>
PYCOMM_HOST_DEVICE void with_float_type(DType dtype, F&& f) {
    switch (dtype) {
        case DType::kF16:
            return f(static_cast<F16*>(nullptr));
        case DType::kBF16:
            return f(static_cast<BF16*>(nullptr));
        case DType::kF64:
            return f(static_cast<double*>(nullptr));
        default:
            return f(static_cast<float*>(nullptr));
    }
}

}  // namespace pycomm::cuda
