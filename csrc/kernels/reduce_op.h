// Reductions that kernels and transports know. The numbering travels between ranks.
#pragma once

#include <cstdint>

namespace pycomm {

enum class ReduceOp : uint8_t { kSum, kMean, kMin, kMax };

}  // namespace pycomm
