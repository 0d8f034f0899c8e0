#include "kernels/entries.h"

#include <type_traits>

#include "device/launch.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/grid.h"
#include "kernels/cuda/host.h"
#include "kernels/cuda/sums.h"
#include "kernels/cuda/words.h"

namespace pycomm::cuda {
namespace {

constexpr int64_t kWordsPerBlock = 2048;  // of the upper words of a message

// The power of two that brings `largest` below, and near, the top of float16.
PYCOMM_DEVICE float scale_for(float largest) {
    if (!(largest > 0.0f) || !is_finite(largest)) return 1.0f;
    int exponent = static_cast<int>(device::bits_of(largest) >> 23) - 126;  // largest <= 2 ** exponent
    int fitting = 15 - exponent < 126 ? 15 - exponent : 126;
    return device::float_of(static_cast<uint32_t>((fitting > -126 ? fitting : -126) + 127) << 23);
}

// The value of an entry as it is sent, as it is added up, and what is left of it here.
template <class T>
struct Values {
    using Sum = T;
    PYCOMM_MEMBER static T sent(T value, float) { return value; }
    PYCOMM_MEMBER static T received(T value, float) { return value; }
    PYCOMM_MEMBER static T left(T, float) { return 0; }
};
template <>
struct Values<F16> {
    using Sum = float;
    PYCOMM_MEMBER static F16 sent(float value, float scale) { return device::to_f16(value * scale); }
    PYCOMM_MEMBER static float received(F16 value, float scale) { return device::to_float(value) / scale; }
    PYCOMM_MEMBER static float left(float value, float scale) { return value - received(sent(value, scale), scale); }
};

struct PackJob {
    EntryLayout layout;
    Packing packing;
    Taken taken;
    char* message;
    uint32_t* counter;  // of unpack_entries
};

template <class T>
PYCOMM_KERNEL pack_kernel(PackJob job) {
    using Sum = typename Values<T>::Sum;
    const EntryLayout& layout = job.layout;
    const Taken& taken = job.taken;
    const int64_t thread = thread_of_grid(), stride = threads_of_grid();
    const float scale = layout.half ? scale_for(*taken.largest) : 1.0f;
    if (thread == 0) {
        *job.counter = 0;
        if (layout.half) *reinterpret_cast<float*>(job.message + layout.scale_at) = scale;
    }
    for (int64_t j = thread; j < layout.num_params; j += stride) {
        job.message[j] = static_cast<char>(taken.finite[j] != 0 ? kUsed : kNotFinite);
    }
    for (int64_t bit = thread; bit < layout.num_bits; bit += stride) {
        job.message[layout.num_params + bit] = taken.fingerprint != nullptr && taken.fingerprint[bit] != 0 ? 1 : 0;
    }
    for (int64_t m = thread; m < layout.count; m += stride) {
        const Sum value = load_element<Sum>(taken.values, m);
        const int64_t index = taken.indices[m];
        if (index < (m == 0 ? 0 : int64_t{taken.indices[m - 1]} + 1) || index < 0 || index >= layout.limit) {
            report(job.packing.fault, Mistake::kPackedIndex, m, index, layout.limit);
            continue;
        }
        store_element(job.message + layout.values_at, m, Values<T>::sent(value, scale));
        store_element(taken.flat, index, Values<T>::left(value, scale));
        if (taken.velocity == nullptr || (taken.keeps != nullptr && taken.keeps[m] != 0)) continue;
        store_element(taken.velocity, index, Sum(0));
    }
    write_all_words(job.packing, taken.indices, reinterpret_cast<uint32_t*>(job.message + layout.words_at), thread,
                    stride);
}

struct UnpackJob {
    EntryLayout layout;
    VerdictLayout verdict_layout;
    Packing packing;
    const char* messages;
    int num_ranks;
    int blocks_per_rank;
    Scale factor;
    double most;
    int32_t* indices;
    char* verdict;
    double* largest;  // of every block
    int32_t* borders;

    PYCOMM_MEMBER const char* message(int rank) const { return messages + rank * layout.num_bytes; }
    PYCOMM_MEMBER uint8_t code(int rank, int64_t place) const { return static_cast<uint8_t>(message(rank)[place]); }
};

// The larger of two magnitudes, or NaN if one is.
PYCOMM_DEVICE double larger(double a, double b) { return a != a || a > b ? a : b; }

// The largest magnitude of this block's values, NaN if one is, for all of its threads.
template <class T>
PYCOMM_DEVICE double largest_of_block(const UnpackJob& job, const char* message, Part part) {
    PYCOMM_SHARED(double, of_warps, device::kMaxThreads / device::kWarpSize);
    const float scale = job.layout.half ? *reinterpret_cast<const float*>(message + job.layout.scale_at) : 1.0f;
    double largest = 0.0;
    for (int64_t m = part.begin + device::thread_index(); m < part.end; m += device::num_threads()) {
        auto value =
            static_cast<double>(Values<T>::received(load_element<T>(message + job.layout.values_at, m), scale));
        largest = larger(value < 0.0 ? -value : value, largest);
    }
    int lane = device::thread_index() % device::kWarpSize;
    for (int distance = 1; distance < device::kWarpSize; distance *= 2) {
        largest = larger(device::shuffle(largest, lane ^ distance), largest);
    }
    if (lane == 0) of_warps[device::thread_index() / device::kWarpSize] = largest;
    device::block_barrier();
    for (int w = 0; w < device::num_threads() / device::kWarpSize; ++w) largest = larger(of_warps[w], largest);
    return largest;
}

// Writes the verdict. Called by the block that comes last.
PYCOMM_DEVICE void judge(const UnpackJob& job) {
    PYCOMM_SHARED(uint32_t, bad, 1);
    const EntryLayout& layout = job.layout;
    const VerdictLayout& at = job.verdict_layout;
    if (device::thread_index() == 0) *bad = 0;
    device::block_barrier();
    // A warp for each rank: the first parameter that is not finite, and the largest value of all its blocks.
    const int lane = device::thread_index() % device::kWarpSize, warps = device::num_threads() / device::kWarpSize;
    for (int rank = device::thread_index() / device::kWarpSize; rank < job.num_ranks; rank += warps) {
        const auto none = static_cast<int>(layout.num_params);
        int source = none;
        for (int j = lane; j < source; j += device::kWarpSize) source = job.code(rank, j) == kNotFinite ? j : source;
        double largest = 0.0, *of_blocks = job.largest + rank * job.blocks_per_rank;
        for (int b = lane; b < job.blocks_per_rank; b += device::kWarpSize) largest = larger(of_blocks[b], largest);
        for (int distance = 1; distance < device::kWarpSize; distance *= 2) {
            const int other = device::shuffle(source, lane ^ distance);
            source = other < source ? other : source;
            largest = larger(device::shuffle(largest, lane ^ distance), largest);
        }
        if (lane != 0) continue;
        reinterpret_cast<int64_t*>(job.verdict + at.sources_at)[rank] = source == none ? 0 : source + 1;
        if (source != none) device::atomic_max(bad, 1);
        of_blocks[0] = largest;
    }
    for (int64_t j = device::thread_index(); j < layout.num_params; j += device::num_threads()) {
        bool used = false;
        for (int rank = 0; rank < job.num_ranks; ++rank) used = used || job.code(rank, j) != kUnused;
        job.verdict[at.used_at + j] = used ? 1 : 0;
    }
    for (int64_t bit = device::thread_index(); bit < layout.num_bits; bit += device::num_threads()) {
        bool differ = false;
        for (int rank = 1; rank < job.num_ranks; ++rank) {
            differ = differ || job.code(rank, layout.num_params + bit) != job.code(0, layout.num_params + bit);
        }
        job.verdict[at.differing_at + bit] = differ ? 1 : 0;
    }
    device::block_barrier();
    if (device::thread_index() != 0) return;
    double sum = 0.0;
    for (int rank = 0; rank < job.num_ranks; ++rank) sum += job.largest[rank * job.blocks_per_rank];
    sum *= factor_of<double>(job.factor);
    const bool within = sum <= job.most && -sum <= job.most;
    job.verdict[at.finite_at] = *bad == 0 && within ? 1 : 0;
}

// Notes where tiles begin among the entries of `rank`: those after the one with entry m - 1, up to that with entry m.
PYCOMM_DEVICE void note_borders(const UnpackJob& job, int rank, int64_t m, int64_t previous, int64_t index) {
    const int64_t num_tiles = job.layout.num_tiles;
    auto tile_of = [&](int64_t i) { return i < job.layout.limit ? i / kEntryTile : num_tiles - 1; };
    int32_t* const borders = job.borders + rank * num_tiles;
    int64_t tile = previous < 0 ? 0 : tile_of(previous) + 1;
    for (; tile <= tile_of(index); ++tile) borders[tile] = static_cast<int32_t>(m);
    if (m + 1 < job.layout.count) return;
    for (; tile < num_tiles; ++tile) borders[tile] = static_cast<int32_t>(m + 1);
}

template <class T>
PYCOMM_KERNEL unpack_kernel(UnpackJob job) {
    const int rank = device::block_index() / job.blocks_per_rank, number = device::block_index() % job.blocks_per_rank;
    const char* message = job.message(rank);
    auto words = reinterpret_cast<const uint32_t*>(message + job.layout.words_at);
    Part part{number * kWordsPerBlock, (number + 1) * kWordsPerBlock};
    if (part.end > job.packing.upper_words) part.end = job.packing.upper_words;
    // Every block counts what lies before it: with few blocks that is cheaper than waiting for others.
    int64_t before = count_upper_bits(job.packing, words, {0, part.begin});
    Unpacked mine =
        unpack_part(job.packing, words, part, before, job.indices + rank * job.layout.count, true,
                    [&](int64_t m, int64_t previous, int64_t index) { note_borders(job, rank, m, previous, index); });
    bool last_of_rank = number == job.blocks_per_rank - 1;
    if (mine.wrong || (last_of_rank && mine.up_to_here != job.layout.count)) {
        report(job.packing.fault, Mistake::kPackedWords, job.layout.count, 0, job.layout.limit);
    }
    Part values{job.layout.count * number / job.blocks_per_rank, job.layout.count * (number + 1) / job.blocks_per_rank};
    double largest = largest_of_block<T>(job, message, values);
    if (device::thread_index() == 0) job.largest[device::block_index()] = largest;
    auto counter = reinterpret_cast<uint32_t*>(job.verdict);
    if (!counted_as(static_cast<uint32_t>(device::num_blocks()), counter)) return;
    if (device::thread_index() == 0) *counter = 0;  // the same messages may be unpacked again
    judge(job);
}

struct AddJob {
    EntryLayout layout;
    const char* messages;
    int num_ranks;
    const int32_t* indices;
    const int32_t* borders;
    Scale factor;
    char* out;
    StateChange states[2];
    const uint8_t* used;
    const int64_t* ends;
    const uint8_t* finite;
    const int64_t* sources;
    int64_t* last_sources;
    Fault* fault;

    // How many entries of `rank` come before a tile; what a wrong message left there is brought into range.
    PYCOMM_MEMBER int64_t border(int rank, int64_t tile) const {
        if (tile == layout.num_tiles) return layout.count;
        const int64_t found = borders[rank * layout.num_tiles + tile];
        return found < 0 ? 0 : found < layout.count ? found : layout.count;
    }
};

// Restores the state from before the step in elements [begin, end): all of it, or only the state of unused parameters.
template <class Sum>
PYCOMM_DEVICE void undo(const AddJob& job, int64_t begin, int64_t end, bool all) {
    // The parameter that has `begin`.
    int64_t j = all ? 0 : count_before(job.layout.num_params, [&](int64_t k) { return job.ends[k] <= begin; });
    for (int64_t i = begin + device::thread_index(); i < end; i += device::num_threads()) {
        while (!all && j < job.layout.num_params && job.ends[j] <= i) ++j;
        if (!all && (j == job.layout.num_params || job.used[j] != 0)) continue;
        for (const StateChange& state : job.states) {
            if (state.now != nullptr) store_element(state.now, i, load_element<Sum>(state.before, i));
        }
    }
}

template <class T, class Out>
PYCOMM_KERNEL add_kernel(AddJob job) {
    using Sum = typename Values<T>::Sum;
    constexpr int kMostRanks = device::kMaxThreads / 2;  // that are looked up at once
    PYCOMM_SHARED(Sum, tile, kEntryTile);
    PYCOMM_SHARED(int64_t, borders, 2 * kMostRanks);
    const int64_t begin = device::block_index() * kEntryTile;
    const int64_t end = begin + kEntryTile < job.layout.limit ? begin + kEntryTile : job.layout.limit;
    const int thread = device::thread_index(), threads = device::num_threads();
    const bool finite = job.finite == nullptr || *job.finite != 0;
    const Sum factor = finite ? factor_of<Sum>(job.factor) : Sum(__builtin_nan(""));
    if (!finite && job.last_sources != nullptr && device::block_index() == 0) {
        for (int rank = thread; rank < job.num_ranks; rank += threads) job.last_sources[rank] = job.sources[rank];
    }
    if (!finite || job.used != nullptr) undo<Sum>(job, begin, end, !finite);
    for (int i = thread; i < kEntryTile; i += threads) tile[i] = 0;
    for (int first = 0; first < job.num_ranks; first += threads / 2) {
        int rank = first + thread / 2;
        if (rank < job.num_ranks) {
            borders[thread] = job.border(rank, device::block_index() + thread % 2);
        }
        device::block_barrier();
        for (rank = first; rank < first + threads / 2 && rank < job.num_ranks; ++rank) {
            const char* message = job.messages + rank * job.layout.num_bytes;
            const float scale = job.layout.half ? *reinterpret_cast<const float*>(message + job.layout.scale_at) : 1.0f;
            const int64_t from = borders[2 * (rank - first)], to = borders[2 * (rank - first) + 1];
            for (int64_t m = from + thread; m < to; m += threads) {
                Sum value = Values<T>::received(load_element<T>(message + job.layout.values_at, m), scale);
                const int64_t index = job.indices[rank * job.layout.count + m];
                if (index < begin || index >= end) {  // they do not ascend: unpack_entries has not written them
                    report(job.fault, Mistake::kEntryIndex, m, index, job.layout.limit);
                    continue;
                }
                tile[index - begin] += value * factor;
            }
            device::block_barrier();  // ranks add up in their order
        }
    }
    constexpr int kCount = 16 / (sizeof(Out) > sizeof(Sum) ? sizeof(Out) : sizeof(Sum));
    for (int64_t i = int64_t{kCount} * thread; i < end - begin; i += int64_t{kCount} * threads) {
        if (begin + i + kCount > end) {
            for (int64_t at = i; begin + at < end; ++at) store_element(job.out, begin + at, narrow<Out>(tile[at]));
            continue;
        }
        Packet<Out, kCount> packet;
#pragma unroll
        for (int e = 0; e < kCount; ++e) packet.values[e] = narrow<Out>(tile[i + e]);
        store_packet<Out, kCount>(job.out, begin + i, packet);
    }
}

// Calls f with a null pointer of the type that values are sent as.
template <class F>
void with_sent_type(const EntryLayout& layout, F&& f) {
    if (layout.half) return f(static_cast<F16*>(nullptr));
    if (layout.dtype == DType::kF64) return f(static_cast<double*>(nullptr));
    f(static_cast<float*>(nullptr));
}

int blocks_per_rank(const EntryLayout& layout) {
    return static_cast<int>(blocks_for(IndexLayout(layout.limit, layout.count).upper_words, kWordsPerBlock));
}

}  // namespace

void pack_entries(const EntryLayout& layout, const Taken& taken, char* message, char* verdict, Stream stream) {
    PackJob job{layout, packing_of(layout.limit, layout.count), taken, message, reinterpret_cast<uint32_t*>(verdict)};
    with_sent_type(layout, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        device::launch<pack_kernel<T>>("pack_entries", blocks_for(layout.count, device::threads_per_block()), stream,
                                       job);
    });
}

int64_t unpack_entries_workspace_bytes(const EntryLayout& layout, int num_ranks) {
    return int64_t{num_ranks} * blocks_per_rank(layout) * int64_t{sizeof(double)};
}

void unpack_entries(const EntryLayout& layout, const char* messages, int num_ranks, Scale factor, double most,
                    int32_t* indices, char* verdict, Workspace& workspace, Stream stream) {
    workspace.table.clear();  // overwritten
    const VerdictLayout at(layout, num_ranks);
    UnpackJob job{layout,
                  at,
                  packing_of(layout.limit, layout.count),
                  messages,
                  num_ranks,
                  blocks_per_rank(layout),
                  factor,
                  most,
                  indices,
                  verdict,
                  reinterpret_cast<double*>(workspace.memory),
                  reinterpret_cast<int32_t*>(verdict + at.borders_at)};
    with_sent_type(layout, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        device::launch<unpack_kernel<T>>("unpack_entries", int64_t{num_ranks} * job.blocks_per_rank, stream, job);
    });
}

void add_entries(const EntryLayout& layout, const char* messages, int num_ranks, const int32_t* indices, Scale factor,
                 const Outcome& outcome, const char* verdict, Stream stream) {
    const VerdictLayout at(layout, num_ranks);
    AddJob job{layout,
               messages,
               num_ranks,
               indices,
               reinterpret_cast<const int32_t*>(verdict + at.borders_at),
               factor,
               outcome.out.bytes(),
               {},
               outcome.used,
               outcome.ends,
               outcome.finite,
               reinterpret_cast<const int64_t*>(verdict + at.sources_at),
               outcome.last_sources,
               fault()};
    for (size_t s = 0; s < outcome.states.size(); ++s) job.states[s] = outcome.states[s];
    with_sent_type(layout, [&](auto* sent) {
        using T = std::remove_pointer_t<decltype(sent)>;
        with_float_type(outcome.out.dtype, [&](auto* type) {
            using Out = std::remove_pointer_t<decltype(type)>;
            device::launch<add_kernel<T, Out>>("add_entries", blocks_for(layout.limit, kEntryTile), stream, job);
        });
    });
}

}  // namespace pycomm::cuda
