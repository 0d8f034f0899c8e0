// How floats become small integers; see quantize.h.
#pragma once

#include <cstdint>

namespace pycomm {

enum class Norm : uint8_t { kMax, kEuclidean };

struct Quantization {
    int64_t block = 256;
    int levels = 127;
    int bits = 8;
    Norm norm = Norm::kMax;
};

// Units below this are written as 0: their inverse would be no number.
inline constexpr float kSmallestUnit = 0x1p-100f;

}  // namespace pycomm
