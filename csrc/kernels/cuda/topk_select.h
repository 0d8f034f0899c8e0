// The exact k largest, in their order, of a list of candidates or of all elements. One piece of code for both, although
// what it reads differs: each copy more of it takes the compiler as long as all other kernels.
#pragma once

#include "kernels/cuda/topk_digits.h"

namespace pycomm::cuda::selection {

template <class K>
struct Threshold {
    typename K::Key key;  // the k-th largest
    uint32_t ties;        // how many of the elements that have it are selected
};

// `count(pass, low, decided, prefix)` returns the bins with the digits from `low` on of the keys to choose from.
template <class K, class Count>
PYCOMM_DEVICE Threshold<K> find_threshold(uint32_t wanted, Count&& count) {
    using Key = typename K::Key;
    Key prefix = 0, decided = 0;
    int pass = 0;
    for (int high = K::kBits; high > 0; high -= kDigitBits, ++pass) {
        int low = high > kDigitBits ? high - kDigitBits : 0;
        Digit found = find_digit(count(pass, low, decided, prefix), wanted);
        // The last digit may reach into bits that are decided already; they agree.
        prefix |= static_cast<Key>(found.digit) << low;
        decided |= static_cast<Key>(kBins - 1) << low;
        wanted = found.wanted;
    }
    return {prefix, wanted};
}

// How many of the keys of `part` at i are selected: above the threshold in the high half, equal to it in the low one.
template <class K, class KeyAt>
PYCOMM_DEVICE uint64_t tally(Part part, int64_t i, Threshold<K> threshold, KeyAt&& key_at) {
    if (i >= part.end) return 0;
    typename K::Key key = key_at(i);
    return key > threshold.key ? uint64_t{1} << 32 : key == threshold.key ? 1 : 0;
}

// Calls emit(place, i) for what is selected of this block's part; `before`: the tally of all parts before it.
template <class K, class KeyAt, class Emit>
PYCOMM_DEVICE void for_selected(Part part, Threshold<K> threshold, uint64_t before, KeyAt&& key_at, Emit&& emit) {
    constexpr int kItems = 4;  // consecutive ones per thread
    int thread = device::thread_index(), threads = device::num_threads();
    for (int64_t base = part.begin; base < part.end; base += kItems * threads) {
        int64_t first = base + thread * kItems;
        uint64_t tallies[kItems], in_thread = 0, in_round = 0;
        for (int e = 0; e < kItems; ++e) in_thread += tallies[e] = tally<K>(part, first + e, threshold, key_at);
        uint64_t running = before + scan_block(in_thread, &in_round);
        for (int e = 0; e < kItems; ++e) {
            auto above = static_cast<uint32_t>(running >> 32), equal = static_cast<uint32_t>(running);
            running += tallies[e];
            if (tallies[e] == 0 || (tallies[e] == 1 && equal >= threshold.ties)) continue;
            emit(above + (equal < threshold.ties ? equal : threshold.ties), first + e);
        }
        before += in_round;
    }
}

// The k largest, in their order, to the outputs: of the first `listed` of the list, or, where that is 0, of x.
template <class K>
PYCOMM_DEVICE void select(const Job<K>& job, uint32_t* counts, uint32_t listed, Grid& grid) {
    using Key = typename K::Key;
    Part part = part_of(listed != 0 ? listed : job.count);
    auto key_at = [&](int64_t i) { return listed != 0 ? job.list_keys[i] : key_of_x(job, i); };
    Threshold<K> threshold = find_threshold<K>(job.k, [&](int pass, int low, Key decided, Key prefix) {
        uint32_t* bins = job.shared->cleared.histograms[pass];
        count_digits<Key>(bins, counts, part, low, decided, prefix, key_at);
        grid_barrier(grid);
        return bins;
    });
    int thread = device::thread_index(), threads = device::num_threads();
    uint64_t mine = 0, in_block = 0, before = 0, total = 0;
    for (int64_t i = part.begin + thread; i < part.end; i += threads) mine += tally<K>(part, i, threshold, key_at);
    scan_block(mine, &in_block);
    if (thread == 0) job.shared->selected[device::block_index()] = in_block;
    grid_barrier(grid);
    sum_blocks(job.shared->selected, &before, &total);
    for_selected<K>(part, threshold, before, key_at, [&](uint32_t place, int64_t i) {
        uint32_t index = listed != 0 ? job.list_indices[i] : static_cast<uint32_t>(i);
        store_element(job.indices, place, static_cast<int32_t>(index));
        store_element(job.values, place, load_element<typename K::Bits>(job.x, index));
    });
    if (job.threshold != nullptr && device::block_index() == 0 && thread == 0) {
        *job.threshold = K::float_of(threshold.key);
    }
}

}  // namespace pycomm::cuda::selection
