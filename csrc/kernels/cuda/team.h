// Teams of blocks that work together and may wait for each other: all blocks of a kernel started by launch_together, or
// consecutive ones.
#pragma once

#include <cstdint>

#include "device/intrinsics.h"
#include "kernels/cuda/grid.h"

namespace pycomm::cuda {

// On the device; zeros before the kernel starts. A block that is a whole team does not use it.
struct Meeting {
    uint32_t arrived;
    uint32_t dismissed;
};

// At a meeting, between arrive() and dismiss(), the block that comes last works alone, on everyone's results, while the
// others wait. It sees what any thread of the team wrote before, and all see afterwards what it wrote.
struct Team {
    Meeting* meeting;
    int rank;
    int size;
    uint32_t generation = 0;  // meetings so far

    // This block's part of `count` items.
    PYCOMM_MEMBER Part part_of(int64_t count) const { return {count * rank / size, count * (rank + 1) / size}; }
};

// Every thread of the block must call it, and gets the same answer.
PYCOMM_DEVICE bool arrive(Team& team) {
    ++team.generation;
    if (team.size > 1) {
        return counted_as(team.generation * static_cast<uint32_t>(team.size), &team.meeting->arrived);
    }
    device::block_barrier();
    return true;
}

PYCOMM_DEVICE void dismiss(Team& team, bool last) {
    device::block_barrier();
    if (team.size == 1) return;
    if (device::thread_index() == 0) {
        if (last) {
            device::device_fence();
            device::atomic_max(&team.meeting->dismissed, team.generation);
        } else {
            while (device::atomic_read(&team.meeting->dismissed) < team.generation) device::pause();
            device::device_fence();
        }
    }
    device::block_barrier();
}

// Called by the block that came last, with a value of every block of the team: each becomes the sum of those before it.
// Returns the sum of all.
PYCOMM_DEVICE uint32_t add_up_before(uint32_t* values, int size) {
    uint64_t sum = 0;
    for (int base = 0; base < size; base += device::num_threads()) {
        int i = base + device::thread_index();
        uint64_t value = i < size ? values[i] : 0, total = 0;
        uint64_t before = sum + scan_block(value, &total);
        if (i < size) values[i] = static_cast<uint32_t>(before);
        sum += total;
    }
    return static_cast<uint32_t>(sum);
}

}  // namespace pycomm::cuda
