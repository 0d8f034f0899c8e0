// What launchers share.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm::cuda {

inline int64_t blocks_for(int64_t items, int64_t items_per_block) {
    return (items + items_per_block - 1) / items_per_block;
}

// Calls f with a null pointer of the floating element type.
template <class F>
void with_kernel_type(DType dtype, F&& f) {
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
