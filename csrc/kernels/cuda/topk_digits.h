// Radix selection's two steps: how often each digit occurs, and which one the wanted key has.
#pragma once

#include "kernels/cuda/topk_job.h"

namespace pycomm::cuda::selection {

// Counts how often each digit (12 bits from `low` on) occurs among the keys of `part` whose bits under `decided` equal
// `prefix`. `counts`: kBins of the block's shared memory; between two calls lies a barrier.
template <class Key, class KeyAt>
PYCOMM_DEVICE void count_digits_in_block(uint32_t* counts, Part part, int low, Key decided, Key prefix,
                                         KeyAt&& key_at) {
    constexpr int kUnroll = 4;
    int thread = device::thread_index(), threads = device::num_threads(), lane = thread % kWarpSize;
    for (uint32_t bin = static_cast<uint32_t>(thread); bin < kBins; bin += static_cast<uint32_t>(threads)) {
        counts[bin] = 0;
    }
    device::block_barrier();
    for (int64_t base = part.begin; base < part.end; base += kUnroll * threads) {
        Key keys[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            int64_t i = base + u * threads + thread;
            keys[u] = i < part.end ? key_at(i) : 0;
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            bool counted = base + u * threads + thread < part.end && (keys[u] & decided) == prefix;
            auto digit = static_cast<uint32_t>(keys[u] >> low) & (kBins - 1);
            unsigned some = device::ballot(counted);
            if (some == 0) continue;
            // Nearby keys share digits, ties all of them: the lanes that agree with the first one add up once.
            uint32_t first = device::shuffle(digit, device::lowest_one(some));
            unsigned same = device::ballot(counted && digit == first);
            if (lane == 0) device::atomic_add(&counts[first], static_cast<uint32_t>(device::count_ones(same)));
            if (counted && digit != first) device::atomic_add(&counts[digit], 1);
        }
    }
    device::block_barrier();
}

// The same, added to `bins`, which other blocks add to as well.
template <class Key, class KeyAt>
PYCOMM_DEVICE void count_digits(uint32_t* bins, uint32_t* counts, Part part, int low, Key decided, Key prefix,
                                KeyAt&& key_at) {
    count_digits_in_block<Key>(counts, part, low, decided, prefix, key_at);
    auto thread = static_cast<uint32_t>(device::thread_index()), threads = static_cast<uint32_t>(device::num_threads());
    for (uint32_t bin = thread; bin < kBins; bin += threads) {
        if (counts[bin] != 0) device::atomic_add(&bins[bin], counts[bin]);
    }
}

struct Digit {
    uint32_t digit;   // the one that the wanted-th largest key has
    uint32_t wanted;  // its rank among the keys with that digit, from 1
};

// From the top: in which bin the wanted-th key lies. The bins hold at least `wanted` keys.
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

}  // namespace pycomm::cuda::selection
