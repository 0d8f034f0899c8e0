// Shared by the phases of an exact selection: what to select from, and what the blocks exchange.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "device/intrinsics.h"
#include "device/runtime.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/host.h"
#include "kernels/cuda/team.h"
#include "kernels/cuda/topk_keys.h"

namespace pycomm::cuda::selection {

using device::kWarpSize;

inline constexpr int kDigitBits = 12;
inline constexpr uint32_t kBins = 1u << kDigitBits;
inline constexpr int kMaxBlocks = 512;
inline constexpr uint32_t kSampleLines = 2048, kLineElems = 16;
inline constexpr uint32_t kMostEdges = 2048;

// A key in the bin that holds the k-th one, and which block of the team has it.
template <class Key>
struct Edge {
    Key key;
    uint32_t rank;
};

// Shared by the blocks of a team. Zeros before the kernel starts; the bins are zeros again after every meeting.
struct alignas(16) Record {
    Meeting meeting;
    // Written by the block that comes last to a meeting, read by all after it.
    uint32_t listed;  // elements in the list; 0: it is unusable
    uint32_t digit;   // or bin, in which the wanted-th of the keys lies
    uint32_t wanted;
    uint32_t ties;       // number of selected keys that equal the k-th
    uint32_t is_exact;   // 0: there were too many edges
    uint32_t num_edges;  // found by all blocks
    uint64_t key;        // the k-th
    uint32_t bins[kBins];
};

// The rank in a sample of x at which to guess the threshold; 0: sampling does not pay, select from x.
PYCOMM_HOST_DEVICE uint32_t sample_rank_of(int64_t count, int64_t k) {
    constexpr int64_t kSmall = 1 << 16;
    constexpr double kSampled = double{kSampleLines} * kLineElems;
    if (count < kSmall || k > count / 4) return 0;
    double expected = kSampled * static_cast<double>(k) / static_cast<double>(count);
    // Four standard deviations of slack: one miss in 30,000 on independent data.
    double rank = expected + 4.0 * std::sqrt(expected) + 4.0;
    return rank < kSampled ? static_cast<uint32_t>(rank) : 0;
}

// A selection from one array. A block of the team finds its own number at [rank].
template <class K>
struct Job {
    const char* x;
    uint32_t count;
    uint32_t k;
    float* threshold;
    char* values;
    char* indices;
    uint32_t* largest;     // of the keys that all teams select; null: not needed
    int64_t offset;        // of x in the array that the indices refer to
    uint32_t sample_rank;  // see sample_rank_of()
    uint32_t capacity;     // of the list
    Record* record;
    uint32_t* marked;  // elements marked by each block; later by those before it
    uint32_t* above;   // likewise: elements above the threshold
    uint32_t* equal;   // likewise: elements equal to it
    Edge<typename K::Key>* edges;
    uint32_t* words;  // marks: see View
    typename K::Key* list_keys;
    uint32_t* list_indices;
};

// x seen from the last 16-byte border before it: elements [shift, shift + count) are its own. Bit i % 32 of mark i / 32
// is element i. Blocks and warps work on tiles of 1,024 elements.
template <class K>
struct View {
    using Bits = typename K::Bits;
    static constexpr int kTileElems = 1024;
    static constexpr int kTileWords = kTileElems / 32;
    static constexpr int kCount = 16 / sizeof(Bits);      // elements per packet
    static constexpr int kTileRows = kWarpSize / kCount;  // of a packet for each lane
    static constexpr int kRowElems = kWarpSize * kCount;
    static constexpr int kBatchRows = kTileRows < 8 ? kTileRows : 8;  // whose loads are under way together

    const char* base;
    int64_t shift, end;
    bool packets;  // false: elements that are not even aligned to their own size

    PYCOMM_MEMBER explicit View(const Job<K>& job) {
        auto address = reinterpret_cast<uintptr_t>(job.x);
        packets = address % sizeof(Bits) == 0;
        shift = packets ? static_cast<int64_t>(address % 16 / sizeof(Bits)) : 0;
        base = job.x - shift * static_cast<int64_t>(sizeof(Bits));
        end = shift + job.count;
    }

    PYCOMM_MEMBER int64_t num_tiles() const { return (end + kTileElems - 1) / kTileElems; }

    // The packets that this lane has of kBatchRows rows of a tile, from `row` on. Elements outside x read as 0, a key
    // that is never marked.
    PYCOMM_MEMBER void load(int64_t tile, int row, Packet<Bits, kCount> (&rows)[kBatchRows]) const {
        int64_t first = tile * kTileElems + row * kRowElems + device::thread_index() % kWarpSize * kCount;
        if (packets && tile * kTileElems >= shift && (tile + 1) * kTileElems <= end) {
            auto from =
                reinterpret_cast<const Packet<Bits, kCount>*>(base + first * static_cast<int64_t>(sizeof(Bits)));
#pragma unroll
            for (int r = 0; r < kBatchRows; ++r) rows[r] = from[r * kWarpSize];
            return;
        }
#pragma unroll
        for (int r = 0; r < kBatchRows; ++r) {
#pragma unroll
            for (int e = 0; e < kCount; ++e) {
                int64_t i = first + r * kRowElems + e;
                rows[r].values[e] = i >= shift && i < end ? load_element<Bits>(base, i) : 0;
            }
        }
    }
};

// How many blocks select from `count` elements on `device`. `resident`: how many can run at once. Two on each
// multiprocessor have enough bytes under way to fill the memory bus; one, where they read little, meets sooner.
inline int64_t blocks_for_selection(int64_t count, int device, int64_t resident, int64_t per_multiprocessor) {
    constexpr int64_t kElemsPerBlock = 8192;  // fewer do not pay for one more block at every meeting
    int64_t most = std::min({resident, per_multiprocessor * device::num_multiprocessors(device), int64_t{kMaxBlocks}});
    return std::max(std::min(blocks_for(count, kElemsPerBlock), most), int64_t{1});
}

template <class K>
PYCOMM_DEVICE typename K::Key key_of_x(const Job<K>& job, int64_t i) {
    return K::of(load_element<typename K::Bits>(job.x, i));
}

}  // namespace pycomm::cuda::selection
