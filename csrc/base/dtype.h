// Element types and their names. The numbering is shared with pycomm/kernels/arrays.py and travels between ranks.
#pragma once

#include <cstdint>

namespace pycomm {

enum class DType : uint8_t { kF32, kF16, kBF16, kF64, kI8, kU8, kI32, kI64 };

inline constexpr int kNumDTypes = 8;

// IEEE binary16 and bfloat16 as bits; arithmetic happens in float.
struct F16 {
    uint16_t bits;
};
struct BF16 {
    uint16_t bits;
};

inline int64_t size_of(DType dtype) {
    switch (dtype) {
        case DType::kF32:
        case DType::kI32:
            return 4;
        case DType::kF16:
        case DType::kBF16:
            return 2;
        case DType::kF64:
        case DType::kI64:
            return 8;
        case DType::kI8:
        case DType::kU8:
            return 1;
    }
    return 0;
}

inline const char* name_of(DType dtype) {
    constexpr const char* kNames[kNumDTypes] = {"float32", "float16", "bfloat16", "float64",
                                                "int8",    "uint8",   "int32",    "int64"};
    return kNames[static_cast<int>(dtype)];
}

inline bool is_floating(DType dtype) { return dtype <= DType::kF64; }

}  // namespace pycomm
