// Shared by the phases of topk.cu: the arguments, x in packets, and each block's part of the work.
#pragma once

#include <cstdint>

#include "device/intrinsics.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/grid.h"
#include "kernels/cuda/topk_keys.h"

namespace pycomm::cuda::selection {

using device::kWarpSize;

inline constexpr uint32_t kTileElems = 1024;  // a word of marks per lane of a warp
inline constexpr int kDigitBits = 12;
inline constexpr uint32_t kBins = 1u << kDigitBits;
inline constexpr int kMaxPasses = 6;  // of the widest keys, 63 bits
inline constexpr int kMaxBlocks = 1024;
inline constexpr uint32_t kSampleLines = 2048, kLineElems = 16;

// Cleared before the kernel starts.
struct Cleared {
    uint32_t arrived;  // at grid barriers
    uint32_t padding[63];
    uint32_t sampled[kBins];
    uint32_t histograms[kMaxPasses][kBins];
};

struct Shared {  // among blocks
    Cleared cleared;
    uint32_t marked[kMaxBlocks];    // elements, per block
    uint64_t selected[kMaxBlocks];  // above the threshold in the high half, equal to it in the low one
};

template <class K>
struct Job {
    const char* x;
    uint32_t count;
    uint32_t k;
    float* threshold;
    char* values;
    char* indices;
    uint32_t sample_rank;  // how far down the sample the guess lies; 0: no candidates, select from x
    uint32_t capacity;     // of the list
    Shared* shared;
    uint32_t* words;        // marks, kTileElems / 32 per tile
    uint32_t* tile_counts;  // how many marks a tile has
    typename K::Key* list_keys;
    uint32_t* list_indices;
};

// x seen from the last 16-byte border before it: elements [shift, shift + count) are its own.
template <class K>
struct View {
    using Bits = typename K::Bits;
    static constexpr uint32_t kCount = 16 / sizeof(Bits);  // elements per packet, words of marks per row of a warp

    const char* base;
    uint32_t shift;
    uint64_t end;
    bool packets;  // false: elements that are not even aligned to their own size

    PYCOMM_MEMBER explicit View(const Job<K>& job) {
        auto address = reinterpret_cast<uintptr_t>(job.x);
        packets = address % sizeof(Bits) == 0;
        shift = packets ? static_cast<uint32_t>(address % 16 / sizeof(Bits)) : 0;
        base = job.x - shift * sizeof(Bits);
        end = static_cast<uint64_t>(shift) + job.count;
    }

    PYCOMM_MEMBER uint32_t num_tiles() const { return static_cast<uint32_t>((end + kTileElems - 1) / kTileElems); }

    // Elements outside x read as 0, a key that is never marked.
    PYCOMM_MEMBER Packet<Bits, kCount> at(uint64_t position) const {
        if (packets && position >= shift && position + kCount <= end) {
            return *reinterpret_cast<const Packet<Bits, kCount>*>(base + position * sizeof(Bits));
        }
        Packet<Bits, kCount> out = {};
        for (uint32_t e = 0; e < kCount; ++e) {
            if (position + e >= shift && position + e < end) {
                out.values[e] = load_element<Bits>(base, static_cast<int64_t>(position + e));
            }
        }
        return out;
    }
};

template <class K>
PYCOMM_DEVICE typename K::Key key_of_x(const Job<K>& job, int64_t i) {
    return K::of(load_element<typename K::Bits>(job.x, i));
}

}  // namespace pycomm::cuda::selection
