// The exact k largest, in their order, of a list of candidates or of all elements.
#pragma once

#include "kernels/cuda/topk_candidates.h"

namespace pycomm::cuda::selection {

template <class K>
struct Threshold {
    typename K::Key key;  // the k-th largest
    uint32_t ties;        // how many of the elements that have it are selected
};

// Finds the wanted-th largest of keys of `bits` bits. digit_of(low, decided, prefix, wanted) considers the keys whose
// bits under `decided` are `prefix`, and returns the digit of the wanted-th of them from bit `low` on.
template <class K, class DigitOf>
PYCOMM_DEVICE Threshold<K> find_threshold(int bits, uint32_t wanted, DigitOf&& digit_of) {
    using Key = typename K::Key;
    Key prefix = 0, decided = 0;
    for (int high = bits; high > 0; high -= kDigitBits) {
        int low = high > kDigitBits ? high - kDigitBits : 0;
        Digit found = digit_of(low, decided, prefix, wanted);
        // The last digit may reach into bits that are decided already; they agree.
        prefix |= static_cast<Key>(found.digit) << low;
        decided |= static_cast<Key>(kBins - 1) << low;
        wanted = found.wanted;
    }
    return {prefix, wanted};
}

// Whether the key of `part` at i is above the threshold (1 in the high half) or equal to it (1 in the low half).
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

// Called by the block that came last: publishes the threshold and, for every block, what is selected before it.
template <class K>
PYCOMM_DEVICE void note_threshold(const Job<K>& job, const Team& team, Threshold<K> threshold) {
    add_up_before(job.above, team.size);
    add_up_before(job.equal, team.size);
    if (device::thread_index() != 0) return;
    job.record->key = threshold.key;
    job.record->ties = threshold.ties;
    job.record->is_exact = 1;
}

// Called by the block that came last: the threshold, from the edges alone.
template <class K>
PYCOMM_DEVICE void decide_edges(const Job<K>& job, const Floor<K>& floor, uint32_t* counts, const Team& team) {
    using Key = typename K::Key;
    Record* record = job.record;
    const uint32_t num_edges = device::atomic_read(&record->num_edges);
    if (num_edges > kMostEdges) {
        if (device::thread_index() == 0) record->is_exact = 0;
        return;
    }
    const Part all{0, num_edges};
    const Key base = floor.base(record->digit);
    Threshold<K> threshold = find_threshold<K>(
        floor.bits(record->digit), record->wanted, [&](int low, Key decided, Key prefix, uint32_t wanted) {
            count_digits<Key>(counts, all, low, decided, prefix, [&](int64_t i) { return job.edges[i].key - base; });
            device::block_barrier();
            return find_digit(counts, wanted);
        });
    threshold.key += base;
    for (int64_t i = device::thread_index(); i < num_edges; i += device::num_threads()) {
        Edge<Key> edge = job.edges[i];
        if (edge.key > threshold.key) device::atomic_add(&job.above[edge.rank], 1);
        if (edge.key == threshold.key) device::atomic_add(&job.equal[edge.rank], 1);
    }
    device::block_barrier();
    note_threshold(job, team, threshold);
}

// Finds the threshold of a list, given its bin in the histogram, with one more meeting. record->is_exact is 0 if that
// bin holds more keys than there is room for edges.
template <class K>
PYCOMM_DEVICE void threshold_of_list(const Job<K>& job, const Candidates<K>& from, uint32_t* counts, Team& team) {
    const uint32_t bin = job.record->digit;
    uint64_t mine = 0, above = 0;
    for (int64_t i = from.part.begin + device::thread_index(); i < from.part.end; i += device::num_threads()) {
        typename K::Key key = job.list_keys[i];
        uint32_t in = from.floor.bin_of(key);
        if (in > bin) ++mine;
        if (in != bin) continue;
        uint32_t place = device::atomic_add(&job.record->num_edges, 1);
        if (place < kMostEdges) job.edges[place] = {key, static_cast<uint32_t>(team.rank)};
    }
    scan_block(mine, &above);
    if (device::thread_index() == 0) {
        job.above[team.rank] = static_cast<uint32_t>(above);
        job.equal[team.rank] = 0;
    }
    bool last = arrive(team);
    if (last) decide_edges(job, from.floor, counts, team);
    dismiss(team, last);
}

// The threshold of any keys, by radix: a meeting for every 12 bits, and one more.
template <class K, class KeyAt>
PYCOMM_DEVICE void threshold_of_all(const Job<K>& job, Part part, uint32_t* counts, Team& team, KeyAt&& key_at) {
    using Key = typename K::Key;
    Record* record = job.record;
    Threshold<K> threshold =
        find_threshold<K>(K::kBits, job.k, [&](int low, Key decided, Key prefix, uint32_t wanted) -> Digit {
            count_digits<Key>(counts, part, low, decided, prefix, key_at);
            add_counts(counts, record->bins);
            bool last = arrive(team);
            if (last) note_digit(record, wanted);
            dismiss(team, last);
            return {record->digit, record->wanted};
        });
    uint64_t mine = 0, in_block = 0;
    for (int64_t i = part.begin + device::thread_index(); i < part.end; i += device::num_threads()) {
        mine += tally<K>(part, i, threshold, key_at);
    }
    scan_block(mine, &in_block);
    if (device::thread_index() == 0) {
        job.above[team.rank] = static_cast<uint32_t>(in_block >> 32);
        job.equal[team.rank] = static_cast<uint32_t>(in_block);
    }
    bool last = arrive(team);
    if (last) note_threshold(job, team, threshold);
    dismiss(team, last);
}

// Writes the k largest, in their order, to the outputs.
template <class K>
PYCOMM_DEVICE void select(const Job<K>& job, const Candidates<K>& from, uint32_t* counts, Team& team) {
    const Part part = from.listed ? from.part : team.part_of(job.count);
    auto key_at = [&](int64_t i) { return from.listed ? job.list_keys[i] : key_of_x(job, i); };
    if (from.listed) threshold_of_list(job, from, counts, team);
    if (!from.listed || job.record->is_exact == 0) threshold_of_all(job, part, counts, team, key_at);
    const Threshold<K> threshold{static_cast<typename K::Key>(job.record->key), job.record->ties};
    const uint64_t before = static_cast<uint64_t>(job.above[team.rank]) << 32 | job.equal[team.rank];
    uint32_t largest = 0;
    for_selected<K>(part, threshold, before, key_at, [&](uint32_t place, int64_t i) {
        uint32_t index = from.listed ? job.list_indices[i] : static_cast<uint32_t>(i);
        store_element(job.indices, place, static_cast<int32_t>(job.offset + index));
        typename K::Bits value = load_element<typename K::Bits>(job.x, index);
        store_element(job.values, place, value);
        auto key = static_cast<uint32_t>(K::of(value));
        largest = key > largest ? key : largest;
    });
    if (job.largest != nullptr && largest > device::atomic_read(job.largest)) device::atomic_max(job.largest, largest);
    if (job.threshold != nullptr && team.rank == 0 && device::thread_index() == 0) {
        *job.threshold = K::float_of(threshold.key);
    }
}

}  // namespace pycomm::cuda::selection
