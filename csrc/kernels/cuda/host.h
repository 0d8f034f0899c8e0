// Helpers of launchers.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm::cuda {

inline int64_t blocks_for(int64_t items, int64_t items_per_block) {
    return (items + items_per_block - 1) / items_per_block;
}

// Rounds up to the next border of 256 bytes, where arrays in scratch memory begin.
inline int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace pycomm::cuda
