// Mistakes that kernels find while they run, reported to the host without a wait.
#pragma once

#include <cstdint>

#include "device/intrinsics.h"

namespace pycomm::cuda {

enum class Mistake : uint32_t { kScatterIndex, kPackedIndex, kPackedWords, kEntryIndex, kWordsOfChunks };

// In memory of the host that kernels can write to. The first fault stays until it has been raised.
struct Fault {
    uint32_t raised;
    Mistake mistake;
    uint64_t
        found;  // position in the low half, index in the high one: one store, so that two threads' reports do not mix
    int64_t limit;
};

// The record of this process, allocated at its first use.
Fault* fault();

PYCOMM_DEVICE void report(Fault* fault, Mistake mistake, int64_t position, int64_t index, int64_t limit) {
    if (device::atomic_read(&fault->raised) != 0) return;
    fault->mistake = mistake;
    fault->limit = limit;
    uint64_t found = static_cast<uint64_t>(index) << 32 | static_cast<uint32_t>(position);
    *static_cast<volatile uint64_t*>(&fault->found) = found;
    device::system_fence();  // the host must not see `raised` before the rest
    *static_cast<volatile uint32_t*>(&fault->raised) = 1;
}

}  // namespace pycomm::cuda
