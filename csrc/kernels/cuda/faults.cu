#include "kernels/cuda/faults.h"

#include <string>

#include "base/error.h"
#include "device/runtime.h"
#include "kernels/on_device.h"

namespace pycomm::cuda {
namespace {

std::string text_of(Mistake mistake, uint64_t found, long long limit) {
    auto position = static_cast<uint32_t>(found);
    auto index = static_cast<int32_t>(found >> 32);
    switch (mistake) {
        case Mistake::kPackedIndex:
            return format("pack_indices: indices[%u] is %d, wanted 0 <= index < %lld, ascending", position, index,
                          limit);
        case Mistake::kPackedWords:
            return format("unpack_indices: words were not made by pack_indices from %u indices below %lld", position,
                          limit);
        case Mistake::kEntryIndex:
            return format(
                "add_entries: indices[%u] of a rank is %d, wanted 0 <= index < %lld, as unpack_entries writes them",
                position, index, limit);
        case Mistake::kWordsOfChunks:
            return format("unpack_chunks: words[%u] was not made by pack_chunks from %lld elements in this format",
                          position, limit);
        default:
            return format("scatter_add: indices[%u] is %d, wanted 0 <= index < %lld", position, index, limit);
    }
}

}  // namespace

Fault* fault() {
    static Fault* const one = [] {
        device::RelaxedCapture relaxed;
        return static_cast<Fault*>(device::allocate_mapped(sizeof(Fault)));
    }();
    return one;
}

void raise_faults() {
    volatile Fault* seen = fault();
    if (seen->raised == 0) return;
    std::string text = text_of(seen->mistake, seen->found, seen->limit) +
                       " (in this or an earlier call on a GPU; with PYCOMM_SYNC=1 in the environment the call that "
                       "caused it raises this)";
    seen->raised = 0;
    throw ArgumentError(text);
}

}  // namespace pycomm::cuda
