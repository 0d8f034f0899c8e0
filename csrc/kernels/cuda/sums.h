// Sums over each array of a table, in double or uint64_t, without atomics: their order depends on nothing but the
// lengths of the arrays and the number of threads.
//
// A kernel over for_segments() stores the sums of every segment in a slot of its own; add_up() adds up the sums of each
// array. The overlap of a tile and an array is segment number tile + array: from one segment to the next at least one
// of them grows, so the numbers are unique.
#pragma once

#include <cstdint>

#include "device/launch.h"
#include "kernels/cuda/table.h"

namespace pycomm::cuda {

// kWidth sums that belong together.
template <int kWidth, class T = double>
struct Sums {
    T values[kWidth];
};

template <int kWidth, class T = double>
int64_t slot_bytes(const std::vector<Buffer>& arrays) {
    int64_t total = 0;
    for (const Buffer& array : arrays) total += array.count;
    return static_cast<int64_t>(sizeof(Sums<kWidth, T>)) *
           (blocks_for(total, kTile) + static_cast<int64_t>(arrays.size()));
}

// All lanes get the same bits: a + b is b + a.
template <class T>
PYCOMM_DEVICE T sum_warp(T value) {
    int lane = device::thread_index() % device::kWarpSize;
    for (int distance = 1; distance < device::kWarpSize; distance *= 2)
        value += device::shuffle(value, lane ^ distance);
    return value;
}

// Every thread of the block must call it.
template <int kWidth, class T>
PYCOMM_DEVICE Sums<kWidth, T> sum_block(const Sums<kWidth, T>& mine) {
    using Sums = Sums<kWidth, T>;  // a macro's argument has no comma
    PYCOMM_SHARED(Sums, of_warps, device::kMaxThreads / device::kWarpSize);
    int lane = device::thread_index() % device::kWarpSize, warp = device::thread_index() / device::kWarpSize;
    Sums sums = mine;
    for (T& value : sums.values) value = sum_warp(value);
    if (lane == 0) of_warps[warp] = sums;
    device::block_barrier();
    sums = {};
    for (int w = 0; w < device::num_threads() / device::kWarpSize; ++w) {
        for (int k = 0; k < kWidth; ++k) sums.values[k] += of_warps[w].values[k];
    }
    device::block_barrier();  // before the next call overwrites of_warps
    return sums;
}

// Stores the sums of the threads that share a segment of `entry` in this block's tile. All of them must call it.
template <int kWidth, class T>
PYCOMM_DEVICE void store_sums(const Table& table, const Entry& entry, Share share, Sums<kWidth, T> mine,
                              Sums<kWidth, T>* slots) {
    Sums<kWidth, T>* slot = slots + device::block_index() + (&entry - table.entries);
    if (share.stride == device::num_threads()) {
        mine = sum_block(mine);
    } else {
        for (T& value : mine.values) value = sum_warp(value);
    }
    if (share.first == 0) *slot = mine;
}

// The sum of this thread's share of an array's slots.
template <int kWidth, class T>
PYCOMM_DEVICE Sums<kWidth, T> sums_of_slots(const Table& table, const Sums<kWidth, T>* slots, int array, Share share) {
    int64_t begin = table.entries[array].begin, end = table.entries[array + 1].begin;
    Sums<kWidth, T> sums = {};
    if (begin >= end) return sums;
    int64_t last = (end - 1) / kTile;
#pragma unroll 4
    for (int64_t tile = begin / kTile + share.first; tile <= last; tile += share.stride) {
        Sums<kWidth, T> slot = slots[tile + array];
        for (int k = 0; k < kWidth; ++k) sums.values[k] += slot.values[k];
    }
    return sums;
}

// A block for each array: out[array * kWidth + k] are its sums.
template <int kWidth, class T>
PYCOMM_KERNEL add_up_kernel(Table table, const Sums<kWidth, T>* slots, T* out) {
    int array = device::block_index();
    Sums<kWidth, T> sums =
        sum_block(sums_of_slots(table, slots, array, {device::thread_index(), device::num_threads()}));
    if (device::thread_index() != 0) return;
    for (int k = 0; k < kWidth; ++k) out[array * kWidth + k] = sums.values[k];
}

template <int kWidth, class T>
void add_up(const char* name, const Table& table, const Sums<kWidth, T>* slots, T* out, Stream stream) {
    device::launch<add_up_kernel<kWidth, T>>(name, table.count, stream, table, slots, out);
}

}  // namespace pycomm::cuda
