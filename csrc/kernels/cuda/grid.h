// Working together beyond a warp: sums over a block's threads, and a barrier among all blocks.
#pragma once

#include <cstdint>

#include "device/intrinsics.h"

namespace pycomm::cuda {

// Exclusive prefix sum over the threads of the block; *total is the sum of all. Every thread must call it.
PYCOMM_DEVICE uint64_t scan_block(uint64_t value, uint64_t* total) {
    PYCOMM_SHARED(uint64_t, warp_sums, device::kMaxThreads / device::kWarpSize);
    int lane = device::thread_index() % device::kWarpSize, warp = device::thread_index() / device::kWarpSize;
    uint64_t inclusive = value;
    for (int distance = 1; distance < device::kWarpSize; distance *= 2) {
        uint64_t below = device::shuffle_up(inclusive, distance);
        if (lane >= distance) inclusive += below;
    }
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

// What a thread needs to meet all others of a kernel started by launch_together.
struct Grid {
    uint32_t* arrived;        // on the device; starts as 0
    uint32_t generation = 0;  // meetings so far
};

// Waits until every block has come here; what any thread wrote before is then seen by all.
PYCOMM_DEVICE void grid_barrier(Grid& grid) {
    ++grid.generation;
    device::block_barrier();
    if (device::thread_index() == 0) {
        device::device_fence();
        device::atomic_add(grid.arrived, 1);
        uint32_t wanted = grid.generation * static_cast<uint32_t>(device::num_blocks());
        while (device::atomic_read(grid.arrived) < wanted) device::pause();
        device::device_fence();
    }
    device::block_barrier();
}

}  // namespace pycomm::cuda
