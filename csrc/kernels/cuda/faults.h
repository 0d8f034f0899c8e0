// What kernels find wrong while they run, told to the host without anyone waiting.
#pragma once

#include <cstdint>

#include "device/intrinsics.h"

namespace pycomm::cuda {

// In memory of the host that kernels can write to. The first fault stays until it has been raised.
struct Fault {
    uint32_t raised;
    uint32_t position;
    int64_t index;
    int64_t limit;
};

// The one of this process; made when first asked for.
Fault* fault();

PYCOMM_DEVICE void report(Fault* fault, uint32_t position, int64_t index, int64_t limit) {
    if (device::atomic_read(&fault->raised) != 0) return;
    fault->position = position;
    fault->index = index;
    fault->limit = limit;
    device::system_fence();  // the host must not see `raised` before the rest
    *static_cast<volatile uint32_t*>(&fault->raised) = 1;
}

}  // namespace pycomm::cuda
