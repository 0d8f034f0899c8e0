// From a guess at the threshold to a list of all elements that reach it, in order, with one read of x.
#pragma once

#include "kernels/cuda/marked.h"
#include "kernels/cuda/topk_digits.h"

namespace pycomm::cuda::selection {

// The bins of the histogram of candidates. They are narrow, so that little is left to decide in the one that holds the
// k-th key. Together they reach from the floor to about twice that; the last one takes everything above.
template <class K>
struct Floor {
    using Key = typename K::Key;
    static constexpr int kShift = K::kMantissa > kDigitBits ? K::kMantissa - kDigitBits : 0;

    Key lowest;  // key of a candidate

    PYCOMM_MEMBER uint32_t bin_of(Key key) const {
        Key bin = (key - lowest) >> kShift;
        return bin < kBins - 1 ? static_cast<uint32_t>(bin) : kBins - 1;
    }
    // The keys of a bin, less base(bin), have this many bits.
    PYCOMM_MEMBER Key base(uint32_t bin) const {
        return bin == kBins - 1 ? 0 : lowest + (static_cast<Key>(bin) << kShift);
    }
    PYCOMM_MEMBER int bits(uint32_t bin) const { return bin == kBins - 1 ? K::kBits : kShift; }
};

// What to select from: a list, of which `part` is this block's; without a list, all of x.
template <class K>
struct Candidates {
    bool listed;
    Part part;
    Floor<K> floor;
};

// What this block has marked.
struct Found {
    uint32_t count;
    uint64_t before_warp;
    MarkedRange marks;
};

// The lowest key of the bin that holds the sample_rank-th largest of the sample.
template <class K>
PYCOMM_DEVICE typename K::Key sample(const Job<K>& job, uint32_t* counts, Team& team) {
    using Key = typename K::Key;
    constexpr int kLow = K::kBits - kDigitBits;
    constexpr int kSamplers = 16;  // blocks that take part
    int samplers = team.size < kSamplers ? team.size : kSamplers;
    if (team.rank < samplers) {
        constexpr int64_t kTotal = int64_t{kSampleLines} * kLineElems;
        Part part{kTotal * team.rank / samplers, kTotal * (team.rank + 1) / samplers};
        int64_t step = (job.count - kLineElems) / kSampleLines;
        count_digits<Key>(counts, part, kLow, 0, 0,
                          [&](int64_t i) { return key_of_x(job, i / kLineElems * step + i % kLineElems); });
        add_counts(counts, job.record->bins);
    }
    bool last = arrive(team);
    if (last) note_digit(job.record, job.sample_rank);
    dismiss(team, last);
    return static_cast<Key>(job.record->digit) << kLow;
}

// Which of a packet's elements reach the floor, from the lowest bit on; counts them in the histogram.
template <class K, int kCount>
PYCOMM_DEVICE uint32_t marks_of(const Packet<typename K::Bits, kCount>& packet, const Floor<K>& floor,
                                uint32_t* counts) {
    uint32_t bits = 0;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
        bits |= static_cast<uint32_t>(K::of(packet.values[e]) >= floor.lowest) << e;
    }
    if (bits != 0) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
            if ((bits >> e & 1u) != 0) device::atomic_add(&counts[floor.bin_of(K::of(packet.values[e]))], 1);
        }
    }
    return bits;
}

// Marks the elements of one tile that reach the floor; all 32 lanes of a warp. Returns how many this lane found.
template <class K>
PYCOMM_DEVICE uint32_t mark_tile(const Job<K>& job, const View<K>& view, int64_t tile, const Floor<K>& floor,
                                 uint32_t* counts) {
    constexpr int kCount = View<K>::kCount, kRows = View<K>::kTileRows, kBatch = View<K>::kBatchRows;
    constexpr int kLanes = kWarpSize / kCount;  // that make a word together; as many as there are rows
    int lane = device::thread_index() % kWarpSize, of_word = lane % kLanes;
    uint32_t mine = 0, found = 0;
#pragma unroll 1
    for (int row = 0; row < kRows; row += kBatch) {
        Packet<typename K::Bits, kCount> rows[kBatch];
        view.load(tile, row, rows);
#pragma unroll
        for (int r = 0; r < kBatch; ++r) {
            uint32_t bits = marks_of<K, kCount>(rows[r], floor, counts);
            if (device::ballot(bits != 0) == 0) continue;
            found += static_cast<uint32_t>(device::count_ones(bits));
            uint32_t word = bits << (kCount * of_word);  // in the end all lanes of the word have it
            for (int distance = 1; distance < kLanes; distance *= 2) word |= device::shuffle(word, lane ^ distance);
            if (of_word == row + r) mine = word;
        }
    }
    job.words[tile * View<K>::kTileWords + of_word * kCount + lane / kLanes] = mine;
    return found;
}

// One read of x: marks, and the histogram, of what reaches the floor, which is at least 1.
template <class K>
PYCOMM_DEVICE Found mark(const Job<K>& job, const Floor<K>& floor, uint32_t* counts, const Team& team) {
    const View<K> view(job);
    const Part tiles = team.part_of(view.num_tiles());
    clear(counts);
    device::block_barrier();
    uint64_t mine = 0, in_block = 0;
    const Part part = part_of_warp(tiles);
    for (int64_t tile = part.begin; tile < part.end; ++tile) mine += mark_tile(job, view, tile, floor, counts);
    uint64_t before = scan_block(mine, &in_block);
    add_counts(counts, job.record->bins);
    int64_t begin = tiles.begin * View<K>::kTileElems, end = tiles.end * View<K>::kTileElems;
    return {static_cast<uint32_t>(in_block), device::shuffle(before, 0), {job.words, begin, end}};
}

// Called by the block that came last: notes and returns whether the candidates of all blocks make a usable list.
template <class K>
PYCOMM_DEVICE bool note_list(const Job<K>& job, const Team& team) {
    uint32_t total = add_up_before(job.marked, team.size);
    bool good = total >= job.k && total <= job.capacity;
    if (device::thread_index() == 0) {
        job.record->listed = good ? total : 0;
        job.record->num_edges = 0;
    }
    return good;
}

// Writes this block's marked elements to the list, in order, from place `at` on. Calls then(key) for each.
template <class K, class Then>
PYCOMM_DEVICE void list(const Job<K>& job, const Found& found, int64_t shift, uint32_t at, Then&& then) {
    found.marks.list(at + found.before_warp, [&](uint64_t place, int64_t bit) {
        int64_t index = bit - shift;
        typename K::Key key = key_of_x(job, index);
        job.list_keys[place] = key;
        job.list_indices[place] = static_cast<uint32_t>(index);
        then(key);
    });
    device::block_barrier();
}

// Lists what reaches the floor, if that makes a usable list. job.record then says in which bin the k-th key lies.
template <class K>
PYCOMM_DEVICE Candidates<K> list_from(const Job<K>& job, const Floor<K>& floor, uint32_t* counts, Team& team) {
    const Found found = mark(job, floor, counts, team);
    if (device::thread_index() == 0) job.marked[team.rank] = found.count;
    bool last = arrive(team);
    if (last) {
        if (note_list(job, team)) {
            note_digit(job.record, job.k);
        } else {
            clear(job.record->bins);
        }
    }
    dismiss(team, last);
    if (job.record->listed == 0) return {};
    uint32_t at = job.marked[team.rank];
    list(job, found, View<K>(job).shift, at, [](typename K::Key) {});
    return {true, {at, at + found.count}, floor};
}

// The same from existing marks: bit i of `all` is element i - all.begin.
template <class K>
PYCOMM_DEVICE Candidates<K> list_marked(const Job<K>& job, const MarkedRange& all, const Floor<K>& floor,
                                        uint32_t* counts, Team& team) {
    const Part part = team.part_of(job.count);
    Found found{0, 0, {all.words, all.begin + part.begin, all.begin + part.end}};
    found.count = found.marks.count(&found.before_warp);
    clear(counts);
    if (device::thread_index() == 0) job.marked[team.rank] = found.count;
    bool last = arrive(team);
    if (last) note_list(job, team);
    dismiss(team, last);
    if (job.record->listed == 0) return {};
    uint32_t at = job.marked[team.rank];
    list(job, found, all.begin, at, [&](typename K::Key key) { device::atomic_add(&counts[floor.bin_of(key)], 1); });
    add_counts(counts, job.record->bins);
    last = arrive(team);
    if (last) note_digit(job.record, job.k);
    dismiss(team, last);
    return {true, {at, at + found.count}, floor};
}

}  // namespace pycomm::cuda::selection
