// A table of arrays on the device, and how a kernel finds its way in it.
//
// The concatenation of all arrays is cut into tiles of equal length, one per block, so that hundreds of arrays of any
// sizes are one launch. A block finds the first array of its tile by a search that a warp does together.
#pragma once

#include <cstdint>
#include <vector>

#include "device/intrinsics.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/host.h"

namespace pycomm::cuda {

// The arrays, some possibly empty, then one entry without data where the last one ends.
struct Table {
    const Entry* entries;  // on the device
    int count;             // of arrays
    int64_t total;         // elements
};

int64_t table_bytes(size_t num_arrays);

// Uploads `arrays` to workspace.memory unless they are there already. They travel as arguments of a small kernel:
// unlike a copy from the host that needs no pinned memory, and a CUDA graph keeps the values. (A workspace that a graph
// uses belongs to that graph.)
// `zeros`: set to 0 by the same kernel.
struct Zeros {
    char* begin = nullptr;  // on a border of 16 bytes, unless there are fewer
    int64_t num_bytes = 0;
};
Table upload(const std::vector<Buffer>& arrays, Workspace& workspace, Stream stream, Zeros zeros = {});

// Sets `zeros` to 0; called by thread `first` of `stride`.
PYCOMM_DEVICE void clear(const Zeros& zeros, int64_t first, int64_t stride) {
    for (int64_t i = first; i < zeros.num_bytes / 16; i += stride) {
        reinterpret_cast<Packet<uint32_t, 4>*>(zeros.begin)[i] = {};
    }
    for (int64_t i = zeros.num_bytes / 16 * 16 + first; i < zeros.num_bytes; i += stride) zeros.begin[i] = 0;
}

inline constexpr int64_t kTile = 4096;      // elements per block
inline constexpr int64_t kLongTile = 8192;  // for kernels with little work per element

// The array that element `position` of the concatenation belongs to: the last of those that begin there or before. All
// lanes get the same answer.
PYCOMM_DEVICE int array_at(const Table& table, int64_t position) {
    int lane = device::thread_index() % device::kWarpSize;
    int low = 0, candidates = table.count;
    while (candidates > 1) {
        int step = (candidates + device::kWarpSize - 1) / device::kWarpSize;
        bool at_or_before =
            lane * step < candidates && (lane == 0 || table.entries[low + lane * step].begin <= position);
        int last = device::count_ones(device::ballot(at_or_before)) - 1;
        low += last * step;
        candidates = candidates - last * step < step ? candidates - last * step : step;
    }
    return low;
}

// Calls segment(entry, begin in the array, begin in the concatenation, count, share) for all that this block's tile,
// of kLength, holds. Long segments are shared by the whole block, short ones go to one warp each.
template <int64_t kLength = kTile, class Segment>
PYCOMM_DEVICE void for_segments(const Table& table, Segment&& segment) {
    constexpr int64_t kShort = 512;
    int64_t begin = device::block_index() * kLength;
    int64_t end = begin + kLength < table.total ? begin + kLength : table.total;
    int warp = device::thread_index() / device::kWarpSize, num_warps = device::num_threads() / device::kWarpSize;
    Share block_share{device::thread_index(), device::num_threads()};
    Share warp_share{device::thread_index() % device::kWarpSize, device::kWarpSize};
    for (int j = array_at(table, begin); j < table.count; ++j) {
        const Entry& entry = table.entries[j];
        if (entry.begin >= end) break;
        int64_t from = entry.begin > begin ? entry.begin : begin;
        int64_t next = table.entries[j + 1].begin;
        int64_t to = next < end ? next : end;
        bool is_short = to - from < kShort;
        if (is_short && j % num_warps != warp) continue;
        segment(entry, from - entry.begin, from, to - from, is_short ? warp_share : block_share);
    }
}

}  // namespace pycomm::cuda
