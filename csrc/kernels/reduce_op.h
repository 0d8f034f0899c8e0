// Reductions that kernels and transports know. The numbering travels between ranks.
#pragma once

#include <cstdint>

namespace pycomm {

enum class ReduceOp : uint8_t { kSum, kMean, kMin, kMax, kProduct, kAnd, kOr, kXor };

inline constexpr int kNumReduceOps = 8;

// Whether it works on the bits of integers.
inline constexpr bool is_bitwise(ReduceOp op) { return op >= ReduceOp::kAnd; }

inline const char* name_of(ReduceOp op) {
    constexpr const char* kNames[kNumReduceOps] = {"sum", "mean", "min", "max", "product", "band", "bor", "bxor"};
    return kNames[static_cast<int>(op)];
}

}  // namespace pycomm
