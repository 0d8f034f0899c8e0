// Format of floats as few bits; see quantize.h.
#pragma once

#include <cstdint>

namespace pycomm {

enum class Norm : uint8_t { kMax, kEuclidean };
// What codes are: whole numbers, or floats of 8 bits (fp8.h).
enum class CodeType : uint8_t { kInt, kE4M3, kE5M2 };

struct Quantization {
    int64_t block = 256;
    int levels = 127;
    int bits = 8;
    Norm norm = Norm::kMax;
    CodeType element = CodeType::kInt;
};

// Scales below this are written as 0: their inverse would not be finite.
inline constexpr float kSmallestScale = 0x1p-100f;

}  // namespace pycomm
