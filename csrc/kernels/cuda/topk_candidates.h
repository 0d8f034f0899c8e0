// From a guess at the threshold to a list of all elements that reach it, in order, with one read of x.
#pragma once

#include "kernels/cuda/topk_digits.h"

namespace pycomm::cuda::selection {

// The lowest key of the bin that holds the sample_rank-th largest of the sample.
template <class K>
PYCOMM_DEVICE typename K::Key sample(const Job<K>& job, uint32_t* counts, Grid& grid) {
    using Key = typename K::Key;
    constexpr int kLow = K::kBits - kDigitBits;
    constexpr int kSamplers = 16;  // blocks that take part
    int samplers = device::num_blocks() < kSamplers ? device::num_blocks() : kSamplers;
    if (device::block_index() < samplers) {
        constexpr int64_t kTotal = int64_t{kSampleLines} * kLineElems;
        Part part{kTotal * device::block_index() / samplers, kTotal * (device::block_index() + 1) / samplers};
        int64_t step = (job.count - kLineElems) / kSampleLines;
        count_digits<Key>(job.shared->cleared.sampled, counts, part, kLow, 0, 0,
                          [&](int64_t i) { return key_of_x(job, i / kLineElems * step + i % kLineElems); });
    }
    grid_barrier(grid);
    return static_cast<Key>(find_digit(job.shared->cleared.sampled, job.sample_rank).digit) << kLow;
}

// Marks the elements of one tile that reach `floor`; all 32 lanes of a warp. Returns how many.
template <class K>
PYCOMM_DEVICE uint32_t mark_tile(const Job<K>& job, const View<K>& view, uint32_t tile, typename K::Key floor) {
    constexpr uint32_t kCount = View<K>::kCount;
    constexpr uint32_t kRows = kWarpSize / kCount;
    auto lane = static_cast<uint32_t>(device::thread_index() % kWarpSize);
    Packet<typename K::Bits, kCount> rows[kRows];  // all loads first, so that they are under way together
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) {
        rows[r] = view.at(static_cast<uint64_t>(tile) * kTileElems + (r * kWarpSize + lane) * kCount);
    }
    uint32_t word = 0, marked = 0;
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) {
#pragma unroll
        for (uint32_t e = 0; e < kCount; ++e) {
            uint32_t ones = device::ballot(K::of(rows[r].values[e]) >= floor);
            if (lane == r * kCount + e) word = ones;
            marked += static_cast<uint32_t>(device::count_ones(ones));
        }
    }
    job.words[tile * kWarpSize + lane] = word;
    if (lane == 0) job.tile_counts[tile] = marked;
    return marked;
}

// One read of x. Afterwards `before` and `total` say how many elements are marked before this block's tiles, and in
// all. `floor` is at least 1: what lies outside x reads as 0.
template <class K>
PYCOMM_DEVICE void mark(const Job<K>& job, typename K::Key floor, Grid& grid, uint64_t* before, uint64_t* total) {
    View<K> view(job);
    Part tiles = part_of(view.num_tiles());
    int warp = device::thread_index() / kWarpSize, warps = device::num_threads() / kWarpSize;
    uint64_t marked = 0, in_block = 0;
    for (int64_t tile = tiles.begin + warp; tile < tiles.end; tile += warps) {
        marked += mark_tile(job, view, static_cast<uint32_t>(tile), floor);
    }
    scan_block(device::thread_index() % kWarpSize == 0 ? marked : 0, &in_block);
    if (device::thread_index() == 0) job.shared->marked[device::block_index()] = static_cast<uint32_t>(in_block);
    grid_barrier(grid);
    sum_blocks(job.shared->marked, before, total);
}

// Writes the marked elements of one tile to the list from `at` on; all 32 lanes of a warp.
template <class K>
PYCOMM_DEVICE void list_tile(const Job<K>& job, const View<K>& view, uint32_t tile, uint32_t at) {
    constexpr uint32_t kCount = View<K>::kCount;
    auto lane = static_cast<uint32_t>(device::thread_index() % kWarpSize);
    uint32_t word = job.words[tile * kWarpSize + lane];
    uint32_t up_to_here = scan_warp(static_cast<uint32_t>(device::count_ones(word)));
    // Bit b of word e of a row is element b * kCount + e of it: order goes through all words of the row.
    uint32_t row = lane / kCount, element = lane % kCount;
    uint32_t up_to_row = device::shuffle(up_to_here, row == 0 ? 0 : static_cast<int>(row * kCount) - 1);
    uint32_t words[kCount];
#pragma unroll
    for (uint32_t e = 0; e < kCount; ++e) words[e] = device::shuffle(word, static_cast<int>(row * kCount + e));
    for (uint32_t left = word; left != 0; left &= left - 1) {
        auto bit = static_cast<uint32_t>(device::lowest_one(left));
        uint32_t place = at + (row == 0 ? 0 : up_to_row);
#pragma unroll
        for (uint32_t e = 0; e < kCount; ++e) {
            place += static_cast<uint32_t>(device::count_ones(words[e] & ((1u << bit) - 1)));
            if (e < element) place += words[e] >> bit & 1u;
        }
        uint32_t index = tile * kTileElems + (row * kWarpSize + bit) * kCount + element - view.shift;
        job.list_indices[place] = index;
        job.list_keys[place] = key_of_x(job, index);
    }
}

// The marked elements, in order, into the list; those of this block from `at` on.
template <class K>
PYCOMM_DEVICE void compact(const Job<K>& job, uint32_t at, Grid& grid) {
    PYCOMM_SHARED(uint32_t, counts, device::kMaxThreads);
    PYCOMM_SHARED(uint32_t, places, device::kMaxThreads);
    View<K> view(job);
    Part tiles = part_of(view.num_tiles());
    int thread = device::thread_index(), threads = device::num_threads();
    int warp = thread / kWarpSize, warps = threads / kWarpSize;
    for (int64_t base = tiles.begin; base < tiles.end; base += threads) {
        uint64_t in_round = 0;
        uint32_t count = base + thread < tiles.end ? job.tile_counts[base + thread] : 0;
        auto before = static_cast<uint32_t>(scan_block(count, &in_round));
        counts[thread] = count;
        places[thread] = at + before;
        device::block_barrier();
        for (int i = warp; i < threads; i += warps) {
            if (counts[i] != 0) list_tile(job, view, static_cast<uint32_t>(base + i), places[i]);
        }
        // The next round is not written before the barriers in its scan.
        at += static_cast<uint32_t>(in_round);
    }
    grid_barrier(grid);
}

}  // namespace pycomm::cuda::selection
