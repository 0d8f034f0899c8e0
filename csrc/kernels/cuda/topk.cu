// How it goes, in one kernel whose blocks all run at once and meet at grid barriers:
//
//   guess    a threshold: 0.98 of an earlier one, or from the histogram of a sample
//   mark     one read of x: a bit per element that reaches the threshold, a count per tile of 1,024
//   compact  prefix sums over the counts put the marked elements into one list, in order
//   select   the exact k-th key by radix, 12 bits per pass over the list; then the list's elements above it, and as
//            many of those equal to it as are wanted, are written in order, placed by prefix sums again
//
// Too few or too many marked: the next guess, at last none: select then works on x itself. Every block takes the same
// decisions, from the same counts. Bits instead of positions while marking: a place in a list would have to be agreed
// at once, and nothing can overflow.
#include "kernels/topk.h"

#include <algorithm>
#include <cmath>

#include "device/launch.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/grid.h"
#include "kernels/cuda/host.h"
#include "kernels/cuda/topk_keys.h"

namespace pycomm::cuda {
namespace {

using device::kWarpSize;

constexpr uint32_t kTileElems = 1024;  // a word of marks per lane of a warp
constexpr int kDigitBits = 12;
constexpr uint32_t kBins = 1u << kDigitBits;
constexpr int kMaxPasses = 6;  // of the widest keys, 63 bits
constexpr int kMaxBlocks = 1024;
constexpr uint32_t kSampleLines = 2048, kLineElems = 16;

// Cleared before the kernel starts.
struct Cleared {
    uint32_t arrived;  // at grid barriers
    uint32_t padding[63];
    uint32_t sampled[kBins];
    uint32_t histograms[kMaxPasses][kBins];
};

struct Shared {  // among blocks
    Cleared cleared;
    uint32_t marked[kMaxBlocks];    // elements, per block
    uint64_t selected[kMaxBlocks];  // above the threshold in the high half, equal to it in the low one
};

template <class K>
struct Job {
    const char* x;
    uint32_t count;
    uint32_t k;
    float* threshold;
    char* values;
    char* indices;
    uint32_t sample_rank;  // how far down the sample the guess lies; 0: no candidates, select from x
    uint32_t capacity;     // of the list
    Shared* shared;
    uint32_t* words;        // marks, kTileElems / 32 per tile
    uint32_t* tile_counts;  // how many marks a tile has
    typename K::Key* list_keys;
    uint32_t* list_indices;
};

// x seen from the last 16-byte border before it: elements [shift, shift + count) are its own.
template <class K>
struct View {
    using Bits = typename K::Bits;
    static constexpr uint32_t kCount = 16 / sizeof(Bits);  // elements per packet, words of marks per row of a warp

    const char* base;
    uint32_t shift;
    uint64_t end;
    bool packets;  // false: elements that are not even aligned to their own size

    PYCOMM_MEMBER explicit View(const Job<K>& job) {
        auto address = reinterpret_cast<uintptr_t>(job.x);
        packets = address % sizeof(Bits) == 0;
        shift = packets ? static_cast<uint32_t>(address % 16 / sizeof(Bits)) : 0;
        base = job.x - shift * sizeof(Bits);
        end = static_cast<uint64_t>(shift) + job.count;
    }

    PYCOMM_MEMBER uint32_t num_tiles() const { return static_cast<uint32_t>((end + kTileElems - 1) / kTileElems); }

    // Elements outside x read as 0, a key that is never marked.
    PYCOMM_MEMBER Packet<Bits, kCount> at(uint64_t position) const {
        if (packets && position >= shift && position + kCount <= end) {
            return *reinterpret_cast<const Packet<Bits, kCount>*>(base + position * sizeof(Bits));
        }
        Packet<Bits, kCount> out = {};
        for (uint32_t e = 0; e < kCount; ++e) {
            if (position + e >= shift && position + e < end) {
                out.values[e] = load_element<Bits>(base, static_cast<int64_t>(position + e));
            }
        }
        return out;
    }
};

template <class K>
PYCOMM_DEVICE typename K::Key key_of_x(const Job<K>& job, int64_t i) {
    return K::of(load_element<typename K::Bits>(job.x, i));
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

// Adds to `bins` how often each digit (12 bits from `low` on) occurs among the keys of `part` whose bits under
// `decided` equal `prefix`. `counts`: kBins of the block's shared memory;
// between two calls lies a barrier.
template <class Key, class KeyAt>
PYCOMM_DEVICE void count_digits(uint32_t* bins, uint32_t* counts, Part part, int low, Key decided, Key prefix,
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
    for (uint32_t bin = static_cast<uint32_t>(thread); bin < kBins; bin += static_cast<uint32_t>(threads)) {
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
    uint32_t up_to_here = static_cast<uint32_t>(device::count_ones(word));
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        uint32_t below = device::shuffle_up(up_to_here, distance);
        if (lane >= static_cast<uint32_t>(distance)) up_to_here += below;
    }
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

template <class K>
struct Threshold {
    typename K::Key key;  // the k-th largest
    uint32_t ties;        // how many of the elements that have it are selected
};

template <class K, class KeyAt>
PYCOMM_DEVICE Threshold<K> find_threshold(const Job<K>& job, uint32_t* counts, Part part, Grid& grid, KeyAt&& key_at) {
    using Key = typename K::Key;
    Key prefix = 0, decided = 0;
    uint32_t wanted = job.k;
    int pass = 0;
    for (int high = K::kBits; high > 0; high -= kDigitBits, ++pass) {
        int low = high > kDigitBits ? high - kDigitBits : 0;
        uint32_t* bins = job.shared->cleared.histograms[pass];
        count_digits<Key>(bins, counts, part, low, decided, prefix, key_at);
        grid_barrier(grid);
        Digit found = find_digit(bins, wanted);
        // The last digit may reach into bits that are decided already; they agree.
        prefix |= static_cast<Key>(found.digit) << low;
        decided |= static_cast<Key>(kBins - 1) << low;
        wanted = found.wanted;
    }
    return {prefix, wanted};
}

// The k largest of `count` items, in their order, to the outputs.
template <class K, class KeyAt, class IndexAt>
PYCOMM_DEVICE void select(const Job<K>& job, uint32_t* counts, int64_t count, Grid& grid, KeyAt&& key_at,
                          IndexAt&& index_at) {
    constexpr int kItems = 4;  // consecutive ones per thread
    Part part = part_of(count);
    Threshold<K> threshold = find_threshold(job, counts, part, grid, key_at);
    int thread = device::thread_index(), threads = device::num_threads();
    auto tally = [&](int64_t i) -> uint64_t {
        if (i >= part.end) return 0;
        typename K::Key key = key_at(i);
        return key > threshold.key ? uint64_t{1} << 32 : key == threshold.key ? 1 : 0;
    };
    uint64_t mine = 0, in_block = 0, before = 0, total = 0;
    for (int64_t i = part.begin + thread; i < part.end; i += threads) mine += tally(i);
    scan_block(mine, &in_block);
    if (thread == 0) job.shared->selected[device::block_index()] = in_block;
    grid_barrier(grid);
    sum_blocks(job.shared->selected, &before, &total);
    for (int64_t base = part.begin; base < part.end; base += kItems * threads) {
        int64_t first = base + thread * kItems;
        uint64_t tallies[kItems], in_thread = 0, in_round = 0;
        for (int e = 0; e < kItems; ++e) in_thread += tallies[e] = tally(first + e);
        uint64_t running = before + scan_block(in_thread, &in_round);
        for (int e = 0; e < kItems; ++e) {
            auto above = static_cast<uint32_t>(running >> 32), equal = static_cast<uint32_t>(running);
            running += tallies[e];
            if (tallies[e] == 0 || (tallies[e] == 1 && equal >= threshold.ties)) continue;
            uint32_t place = above + (equal < threshold.ties ? equal : threshold.ties);
            uint32_t index = index_at(first + e);
            store_element(job.indices, place, static_cast<int32_t>(index));
            store_element(job.values, place, load_element<typename K::Bits>(job.x, index));
        }
        before += in_round;
    }
    if (job.threshold != nullptr && device::block_index() == 0 && thread == 0) {
        *job.threshold = K::float_of(threshold.key);
    }
}

template <class T>
PYCOMM_KERNEL topk_kernel(Job<Keys<T>> job) {
    using K = Keys<T>;
    using Key = typename K::Key;
    PYCOMM_SHARED(uint32_t, counts, kBins);
    Grid grid{&job.shared->cleared.arrived};
    uint64_t before = 0, total = 0;
    bool good = false;
    auto attempt = [&](Key floor) {
        mark(job, floor > 0 ? floor : Key{1}, grid, &before, &total);
        good = total >= job.k && total <= job.capacity;
    };
    if (job.sample_rank != 0) {
        float earlier = job.threshold == nullptr ? 0.0f : *job.threshold;
        if (earlier > 0.0f && is_finite(earlier)) attempt(K::near(0.98f * earlier));
        if (!good) attempt(sample(job, counts, grid));
    }
    if (good) {
        compact(job, static_cast<uint32_t>(before), grid);
        select(
            job, counts, static_cast<int64_t>(total), grid, [&](int64_t i) { return job.list_keys[i]; },
            [&](int64_t i) { return job.list_indices[i]; });
    } else {
        select(
            job, counts, job.count, grid, [&](int64_t i) { return key_of_x(job, i); },
            [&](int64_t i) { return static_cast<uint32_t>(i); });
    }
}

// Where things lie in the workspace.
struct Layout {
    uint32_t sample_rank, capacity;
    int64_t words, tile_counts, keys, indices, num_bytes;

    Layout(const Buffer& x, int64_t k) : sample_rank(0), capacity(0) {
        constexpr int64_t kSmall = 1 << 16;  // sampling costs more than it saves
        constexpr double kSampled = double{kSampleLines} * kLineElems;
        double expected = kSampled * static_cast<double>(k) / static_cast<double>(x.count);
        // Four standard deviations of slack: one miss in 30,000 on independent data.
        double rank = expected + 4.0 * std::sqrt(expected) + 4.0;
        if (x.count >= kSmall && k <= x.count / 4 && rank < kSampled) {
            sample_rank = static_cast<uint32_t>(rank);
            capacity = static_cast<uint32_t>(std::min(x.count, 4 * k + x.count / 64));
        }
        int64_t tiles = capacity == 0 ? 0 : x.count / kTileElems + 2;
        int64_t key_bytes = x.dtype == DType::kF64 ? 8 : 4;
        words = round_up(sizeof(Shared));
        tile_counts = words + round_up(tiles * kWarpSize * 4);
        keys = tile_counts + round_up(tiles * 4);
        indices = keys + round_up(capacity * key_bytes);
        num_bytes = indices + round_up(capacity * int64_t{4});
    }

    static int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }
};

template <class T>
void launch_topk(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices, float* threshold,
                 Workspace& workspace, Stream stream) {
    using K = Keys<T>;
    Layout layout(x, k);
    char* memory = workspace.memory;
    auto shared = reinterpret_cast<Shared*>(memory);
    Job<K> job{x.bytes(),
               static_cast<uint32_t>(x.count),
               static_cast<uint32_t>(k),
               threshold,
               values.bytes(),
               reinterpret_cast<char*>(indices),
               layout.sample_rank,
               layout.capacity,
               shared,
               reinterpret_cast<uint32_t*>(memory + layout.words),
               reinterpret_cast<uint32_t*>(memory + layout.tile_counts),
               reinterpret_cast<typename K::Key*>(memory + layout.keys),
               reinterpret_cast<uint32_t*>(memory + layout.indices)};
    constexpr int64_t kElemsPerBlock = 8192;   // fewer are not worth a block more at every barrier
    constexpr int64_t kPerMultiprocessor = 4;  // enough bytes under way to fill the memory bus
    int64_t resident = device::max_resident_blocks("topk", topk_kernel<T>);
    int64_t most =
        std::min({resident, kPerMultiprocessor * device::num_multiprocessors(x.device), int64_t{kMaxBlocks}});
    int64_t blocks = std::max(std::min(blocks_for(x.count, kElemsPerBlock), most), int64_t{1});
    device::fill_bytes(&shared->cleared, 0, sizeof(Cleared), stream);
    device::launch_together("topk", topk_kernel<T>, blocks, stream, job);
}

}  // namespace

int64_t topk_workspace_bytes(const Buffer& x, int64_t k) { return Layout(x, k).num_bytes; }

void topk(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices, float* threshold, Workspace& workspace,
          Stream stream) {
    workspace.table.clear();  // overwritten
    with_kernel_type(x.dtype, [&](auto* type) {
        launch_topk<std::remove_pointer_t<decltype(type)>>(x, k, values, indices, threshold, workspace, stream);
    });
}

}  // namespace pycomm::cuda
