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

// The smallest magnitude of a From that narrow() makes an infinite T.
template <class From, class T>
PYCOMM_HOST_DEVICE constexpr double first_overflow() {
    // Halfway from the largest number to the next power of two. A double is rounded twice, to float first.
    constexpr bool kTwice = std::is_same_v<From, double>;
    if constexpr (std::is_same_v<T, F16>) {
        return kTwice ? 0x1.ffep15 - 0x1p-9 : 0x1.ffep15;
    } else if constexpr (std::is_same_v<T, BF16>) {
        return kTwice ? 0x1.ffp127 - 0x1p103 : 0x1.ffp127;
    } else if constexpr (std::is_same_v<T, float> && kTwice) {
        return 0x1.ffffffp127;
    } else {
        return __builtin_inf();
    }
}

// A factor. Its parts on the device are loaded by the constructor, and waited for only in as().
struct Factor {
    double value;
    float on_device, divisor, largest;
    int room;
    bool unfits;

    PYCOMM_MEMBER explicit Factor(const Scale& scale)
        : value(scale.value),
          on_device(scale.on_device == nullptr ? 1.0f : *scale.on_device),
          divisor(scale.divisor == nullptr ? 1.0f : *scale.divisor),
          largest(scale.largest == nullptr ? 0.0f : *scale.largest),
          room(scale.room),
          unfits(scale.unfits) {}
    template <class T>
    PYCOMM_MEMBER T as() const {
        const int exponent = fitting_exponent(device::bits_of(largest), room);
        const auto power = static_cast<uint32_t>(127 + (unfits ? -exponent : exponent)) << 23;
        return static_cast<T>(value * static_cast<double>(on_device) / static_cast<double>(divisor) *
                              static_cast<double>(device::float_of(power)));
    }
};

template <class T>
PYCOMM_DEVICE T factor_of(const Scale& scale) {
    return Factor(scale).as<T>();
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

// Elements [i, i + kCount), in one access if they are aligned to it.
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

// Stores those elements of a packet that lie before element `end`.
template <class T, int kCount>
PYCOMM_DEVICE void store_before(int64_t end, char* base, int64_t i, const Packet<T, kCount>& packet) {
    if (i + kCount <= end) return store_packet<T, kCount>(base, i, packet);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
        if (i + e < end) store_element(base, i + e, packet.values[e]);
    }
}

// Stores packets times a factor, each at its place, before element `end`.
template <int kPackets, int kCount>
PYCOMM_DEVICE void store_scaled(int64_t end, char* base, const int64_t (&places)[kPackets],
                                Packet<float, kCount> (&packets)[kPackets], float factor) {
#pragma unroll
    for (int u = 0; u < kPackets; ++u) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) packets[u].values[e] = packets[u].values[e] * factor;
        store_before(end, base, places[u], packets[u]);
    }
}

// Sets `head` to the number of elements before the first packet border of an array of Ts at `pointer`. If the arrays
// before left another number there (negative: none before), they never meet a border together: sets `misfit`.
template <class T, int kCount>
PYCOMM_HOST_DEVICE void align(const void* pointer, int64_t& head, bool& misfit) {
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

// Calls use(i, load(i)) for this thread's share of the places below `count`. kUnroll loads come before the first use,
// so that they are under way together. Past the end the first one is loaded again: the compiler does not group loads
// that depend on a condition.
template <int kUnroll, class Index, class Load, class Use>
PYCOMM_DEVICE void for_places(Index count, Share share, Load&& load, Use&& use) {
    for (Index i = share.first; i < count; i += kUnroll * share.stride) {
        decltype(load(i)) in[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            Index at = i + u * share.stride;
            in[u] = load(at < count ? at : i);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            if (i + u * share.stride < count) use(i + u * share.stride, in[u]);
        }
    }
}

// The same for packets of kCount elements from `base` on, which is a multiple of their size.
template <class T, int kCount, class Use>
PYCOMM_DEVICE void for_packets(const char* base, int count, Share share, Use&& use) {
    constexpr int kEnough = 64 / static_cast<int>(sizeof(Packet<T, kCount>)), kUnroll = kEnough < 8 ? kEnough : 8;
    auto from = reinterpret_cast<const Packet<T, kCount>*>(base);
    for_places<kUnroll>(count, share, [&](int i) { return from[i]; }, use);
}

// Calls take(i, x[i]) for this thread's share of `count` elements at `x`, in packets if they are aligned.
template <class T, class Take>
PYCOMM_DEVICE void for_elements(const char* x, int count, Share share, Take&& take) {
    constexpr int kCount = 16 / sizeof(T);
    int64_t border = -1;
    bool misfit = false;
    align<T, kCount>(x, border, misfit);
    if (misfit) {
        for (int i = share.first; i < count; i += share.stride) take(i, load_element<T>(x, i));
        return;
    }
    int head = border < count ? static_cast<int>(border) : count;
    int packets = (count - head) / kCount, rest = head + packets * kCount + share.first;
    if (share.first < head) take(share.first, load_element<T>(x, share.first));
    for_packets<T, kCount>(x + head * sizeof(T), packets, share, [&](int i, const Packet<T, kCount>& packet) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) take(head + i * kCount + e, packet.values[e]);
    });
    if (rest < count) take(rest, load_element<T>(x, rest));
}

// Converts elements of one array into another array. Instead of checking whether each is finite and below a limit, it
// keeps the largest magnitude: the bits of magnitudes order like the magnitudes, NaN above all.
template <class Src, class Dst>
struct Conversion {
    using Wide = WiderOf<Src, Dst>;
    using Bits = decltype(device::bits_of(Wide{}));
    static constexpr Bits kMagnitude = ~Bits{0} >> 1;

    Wide scale;
    Bits largest = 0;

    PYCOMM_MEMBER Dst operator()(Src x) {
        Wide wide = static_cast<Wide>(widen(x)) * scale;
        Bits bits = device::bits_of(wide) & kMagnitude;
        largest = bits > largest ? bits : largest;
        return narrow<Dst>(wide);
    }

    // Whether all products are below `limit`, and finite as they were written.
    PYCOMM_MEMBER bool all_below(Wide limit) const {
        constexpr auto kOverflow = static_cast<Wide>(first_overflow<Wide, Dst>());
        Wide bound = kOverflow < limit ? kOverflow : limit;
        return bound > 0 && largest < device::bits_of(bound);
    }
};

template <class Src, class Dst, int kCount>
PYCOMM_DEVICE void convert_packets(const char* src, char* dst, int count, Conversion<Src, Dst>& one, Share share) {
    auto to = reinterpret_cast<Packet<Dst, kCount>*>(dst);
    for_packets<Src, kCount>(src, count, share, [&](int i, const Packet<Src, kCount>& in) {
        Packet<Dst, kCount> out;
#pragma unroll
        for (int e = 0; e < kCount; ++e) out.values[e] = one(in.values[e]);
        to[i] = out;
    });
}

// dst[i] = cast(src[i] * scale) for i < count. Returns whether, in this thread's share, everything written is finite
// and every product is below `limit` in magnitude.
template <class Src, class Dst>
PYCOMM_DEVICE bool convert_segment(const char* src, char* dst, int count, WiderOf<Src, Dst> scale,
                                   WiderOf<Src, Dst> limit, Share share) {
    constexpr int kCount = 16 / (sizeof(Src) > sizeof(Dst) ? sizeof(Src) : sizeof(Dst));
    Conversion<Src, Dst> one{scale};
    if (reinterpret_cast<uintptr_t>(src) % sizeof(Src) != 0 || reinterpret_cast<uintptr_t>(dst) % sizeof(Dst) != 0) {
        for (int i = share.first; i < count; i += share.stride) {
            store_element(dst, i, one(load_element<Src>(src, i)));
        }
        return one.all_below(limit);
    }
    int64_t border = -1;
    bool misfit = false;
    align<Src, kCount>(src, border, misfit);
    align<Dst, kCount>(dst, border, misfit);
    int head = misfit || border > count ? count : static_cast<int>(border);  // arrays may never meet at a border
    int packets = (count - head) / kCount, rest = head + packets * kCount + share.first;
    convert_packets<Src, Dst, 1>(src, dst, head, one, share);
    convert_packets<Src, Dst, kCount>(src + head * sizeof(Src), dst + head * sizeof(Dst), packets, one, share);
    if (rest < count) store_element(dst, rest, one(load_element<Src>(src, rest)));
    return one.all_below(limit);
}

// Calls f with a null pointer of the floating element type. In launchers f exists on the host only: the pragma keeps
// the compiler from warning about that.
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
