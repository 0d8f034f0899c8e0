// Keys: magnitudes as unsigned integers that order as the magnitudes do, all NaNs equal and above inf.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "device/intrinsics.h"

namespace pycomm::cuda {

template <class Bits_, class Key_, int kBits_, int kMantissa_, Key_ kNan_>
struct KeysOf {
    using Bits = Bits_;  // an element of x, as it lies in memory
    using Key = Key_;
    static constexpr int kBits = kBits_;
    static constexpr int kMantissa = kMantissa_;  // how many of them are the mantissa's
    static constexpr Key kNan = kNan_;

    PYCOMM_MEMBER static Key of(Bits bits) {
        Key magnitude = bits & ((Key{1} << kBits) - 1);
        return magnitude < kNan ? magnitude : kNan;
    }
};

// float_of: the magnitude that a key stands for. near: the key of a float's magnitude, or near it.
template <class T>
struct Keys;

template <>
struct Keys<float> : KeysOf<uint32_t, uint32_t, 31, 23, 0x7f800001u> {
    PYCOMM_MEMBER static float float_of(Key key) { return device::float_of(key); }
    PYCOMM_MEMBER static Key near(float magnitude) { return of(device::bits_of(magnitude)); }
};
template <>
struct Keys<F16> : KeysOf<uint16_t, uint32_t, 15, 10, 0x7c01u> {
    PYCOMM_MEMBER static float float_of(Key key) { return device::to_float(F16{static_cast<uint16_t>(key)}); }
    PYCOMM_MEMBER static Key near(float magnitude) { return of(device::to_f16(magnitude).bits); }
};
template <>
struct Keys<BF16> : KeysOf<uint16_t, uint32_t, 15, 7, 0x7f81u> {
    PYCOMM_MEMBER static float float_of(Key key) { return device::to_float(BF16{static_cast<uint16_t>(key)}); }
    PYCOMM_MEMBER static Key near(float magnitude) { return of(device::to_bf16(magnitude).bits); }
};
template <>
struct Keys<double> : KeysOf<uint64_t, uint64_t, 63, 52, 0x7ff0000000000001ull> {
    PYCOMM_MEMBER static float float_of(Key key) { return static_cast<float>(device::double_of(key)); }
    PYCOMM_MEMBER static Key near(float magnitude) { return of(device::bits_of(static_cast<double>(magnitude))); }
};

}  // namespace pycomm::cuda
