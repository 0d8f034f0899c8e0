// Format of floats as small integers; see quantize.h.
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

// Scales below this are written as 0: their inverse would not be finite.
inline constexpr float kSmallestScale = 0x1p-100f;

}  // namespace pycomm
