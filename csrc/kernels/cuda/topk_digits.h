// Histograms of keys, and the bin in which the wanted key lies.
#pragma once

#include "kernels/cuda/topk_job.h"

namespace pycomm::cuda::selection {

// Sets all bins to 0. Called by one block, which sees that after its next barrier.
PYCOMM_DEVICE void clear(uint32_t* bins) {
    for (auto bin = static_cast<uint32_t>(device::thread_index()); bin < kBins;
         bin += static_cast<uint32_t>(device::num_threads())) {
        bins[bin] = 0;
    }
}

// Adds what the block has counted, in shared memory, to bins of the whole team.
PYCOMM_DEVICE void add_counts(const uint32_t* counts, uint32_t* bins) {
    device::block_barrier();
    for (auto bin = static_cast<uint32_t>(device::thread_index()); bin < kBins;
         bin += static_cast<uint32_t>(device::num_threads())) {
        if (counts[bin] != 0) device::atomic_add(&bins[bin], counts[bin]);
    }
}

// Counts how often each digit (12 bits from `low` on) occurs among the keys of `part` whose bits under `decided` equal
// `prefix`. `counts`: kBins of the block's shared memory; two calls require a barrier between them.
template <class Key, class KeyAt>
PYCOMM_DEVICE void count_digits(uint32_t* counts, Part part, int low, Key decided, Key prefix, KeyAt&& key_at) {
    constexpr int kUnroll = 4;
    int thread = device::thread_index(), threads = device::num_threads(), lane = thread % kWarpSize;
    clear(counts);
    device::block_barrier();
    for (int64_t base = part.begin; base < part.end; base += kUnroll * threads) {
        Key keys[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            int64_t i = base + u * threads + thread;
            keys[u] = key_at(i < part.end ? i : part.end - 1);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            bool counted = base + u * threads + thread < part.end && (keys[u] & decided) == prefix;
            auto digit = static_cast<uint32_t>(keys[u] >> low) & (kBins - 1);
            unsigned some = device::ballot(counted);
            if (some == 0) continue;
            // Nearby keys often share digits, ties always: the lanes with the first one's digit are counted by one
            // atomic.
            uint32_t first = device::shuffle(digit, device::lowest_one(some));
            unsigned same = device::ballot(counted && digit == first);
            if (lane == 0) device::atomic_add(&counts[first], static_cast<uint32_t>(device::count_ones(same)));
            if (counted && digit != first) device::atomic_add(&counts[digit], 1);
        }
    }
}

struct Digit {
    uint32_t digit;   // the one that the wanted-th largest key has
    uint32_t wanted;  // its rank among the keys with that digit, from 1
};

// The bin, counted from the top, in which the wanted-th key lies. The bins hold at least `wanted` keys.
PYCOMM_DEVICE Digit find_digit(const uint32_t* bins, uint32_t wanted) {
    PYCOMM_SHARED(Digit, found, 1);
    auto thread = static_cast<uint32_t>(device::thread_index()), threads = static_cast<uint32_t>(device::num_threads());
    uint32_t per_thread = (kBins + threads - 1) / threads;
    uint32_t begin = thread * per_thread < kBins ? thread * per_thread : kBins;
    uint32_t end = begin + per_thread < kBins ? begin + per_thread : kBins;
    uint64_t mine = 0, total = 0;
    for (uint32_t i = begin; i < end; ++i) mine += bins[kBins - 1 - i];
    uint64_t before = scan_block(mine, &total);
    if (before < wanted && wanted <= before + mine) {
        uint32_t left = wanted - static_cast<uint32_t>(before);
        uint32_t i = begin;
        for (; bins[kBins - 1 - i] < left; ++i) left -= bins[kBins - 1 - i];
        found[0] = {kBins - 1 - i, left};
    }
    device::block_barrier();
    return found[0];  // not overwritten before the barriers in the next call's scan
}

// Called by the block that came last: notes the bin of the wanted-th key for all, and clears the bins.
PYCOMM_DEVICE void note_digit(Record* record, uint32_t wanted) {
    Digit found = find_digit(record->bins, wanted);
    if (device::thread_index() == 0) {
        record->digit = found.digit;
        record->wanted = found.wanted;
    }
    clear(record->bins);
}

}  // namespace pycomm::cuda::selection
