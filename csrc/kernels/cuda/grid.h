// Working together: sums over the threads of a warp and of a block, and parts for blocks.
#pragma once

#include <cstdint>

#include "device/intrinsics.h"

namespace pycomm::cuda {

// Inclusive prefix sum over the lanes of a warp.
template <class T>
PYCOMM_DEVICE T scan_warp(T value) {
    int lane = device::thread_index() % device::kWarpSize;
    for (int distance = 1; distance < device::kWarpSize; distance *= 2) {
        T below = device::shuffle_up(value, distance);
        if (lane >= distance) value += below;
    }
    return value;
}

// Exclusive prefix sum over the threads of the block; *total is the sum of all. Every thread must call it.
PYCOMM_DEVICE uint64_t scan_block(uint64_t value, uint64_t* total) {
    PYCOMM_SHARED(uint64_t, warp_sums, device::kMaxThreads / device::kWarpSize);
    int lane = device::thread_index() % device::kWarpSize, warp = device::thread_index() / device::kWarpSize;
    uint64_t inclusive = scan_warp(value);
    if (lane == device::kWarpSize - 1) warp_sums[warp] = inclusive;
    device::block_barrier();
    uint64_t before = 0, sum = 0;
    for (int w = 0; w < device::num_threads() / device::kWarpSize; ++w) {
        if (w < warp) before += warp_sums[w];
        sum += warp_sums[w];
    }
    device::block_barrier();  // before the next call overwrites warp_sums
    *total = sum;
    return before + inclusive - value;
}

// This block's part of `count` items: [begin, end).
struct Part {
    int64_t begin;
    int64_t end;
};
PYCOMM_DEVICE Part part_of(int64_t count) {
    return {count * device::block_index() / device::num_blocks(),
            count * (device::block_index() + 1) / device::num_blocks()};
}

// How many of `count` items lie before a border: `before` holds for all items before it, and for none after it.
template <class Before>
PYCOMM_DEVICE int64_t count_before(int64_t count, Before&& before) {
    int64_t found = 0;
    while (count > 0) {
        int64_t half = count / 2;
        if (before(found + half)) {
            found += half + 1;
            count -= half + 1;
        } else {
            count = half;
        }
    }
    return found;
}

// This thread's number among the threads of all blocks, and their total.
PYCOMM_DEVICE int64_t thread_of_grid() {
    return static_cast<int64_t>(device::block_index()) * device::num_threads() + device::thread_index();
}
PYCOMM_DEVICE int64_t threads_of_grid() { return static_cast<int64_t>(device::num_blocks()) * device::num_threads(); }

// Counts this block at `counter`; returns whether it is number `last`, which sees all that the others wrote before they
// were counted. Every thread of the block must call it, and gets the same answer.
PYCOMM_DEVICE bool counted_as(uint32_t last, uint32_t* counter) {
    PYCOMM_SHARED(uint32_t, is_last, 1);
    device::block_barrier();
    if (device::thread_index() == 0) {
        device::device_fence();
        *is_last = device::atomic_add(counter, 1) + 1 == last ? 1 : 0;
        device::device_fence();
    }
    device::block_barrier();
    return *is_last != 0;  // not overwritten before the first barrier of the next call
}

// The sums of values[b] over the blocks before this one, and over all.
template <class T>
PYCOMM_DEVICE void sum_blocks(const T* values, uint64_t* before, uint64_t* total) {
    uint64_t mine_before = 0, mine = 0;
    for (int b = device::thread_index(); b < device::num_blocks(); b += device::num_threads()) {
        uint64_t value = values[b];
        mine += value;
        if (b < device::block_index()) mine_before += value;
    }
    scan_block(mine_before, before);
    scan_block(mine, total);
}

}  // namespace pycomm::cuda
