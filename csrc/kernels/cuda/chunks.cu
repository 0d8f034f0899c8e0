#include "kernels/chunks.h"

#include "device/launch.h"
#include "kernels/cuda/arrays.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/faults.h"
#include "kernels/cuda/grid.h"
#include "kernels/cuda/host.h"

namespace pycomm::cuda {
namespace {

constexpr uint32_t kInf = 0x7f800000u;

// All NaNs share the one key above inf.
PYCOMM_DEVICE uint32_t chunk_key(float x) {
    uint32_t magnitude = device::bits_of(x) & 0x7fffffffu;
    return magnitude < kInf + 1 ? magnitude : kInf + 1;
}

PYCOMM_DEVICE ChunkLevels levels_of_word(uint32_t word, int bits) {
    return ChunkLevels::of(device::float_of(word << 16), device::float_of(word & 0xffff0000u), bits);
}

// The sum over the threads of the block; every thread must call it.
PYCOMM_DEVICE uint64_t sum_of_block(uint64_t mine) {
    uint64_t total = 0;
    scan_block(mine, &total);
    return total;
}

struct Chunking {
    const char* x;
    int64_t whole;
    ChunkLayout each, last;
    int bits;
    uint32_t* words;
    char* remainder;
    float decay;
};

// The chunk of a block of threads. A round is a packet of every thread; kHeld of them stay in registers as keys, where
// places without an element have key 0.
struct Chunk {
    static constexpr int kCount = 4, kHeld = 4;

    const char* x;
    int count;
    uint32_t held[kHeld * kCount];

    PYCOMM_MEMBER int place(int round) const {
        return (round * device::num_threads() + device::thread_index()) * kCount;
    }
    PYCOMM_MEMBER int rounds() const {
        int of_round = kCount * device::num_threads();
        return (count + of_round - 1) / of_round;
    }
    PYCOMM_MEMBER Packet<float, kCount> load(int round) const {
        int at = place(round);
        if (at + kCount <= count) return load_packet<float, kCount>(x, at);
        Packet<float, kCount> out = {};
        for (int e = 0; at + e < count; ++e) out.values[e] = load_element<float>(x, at + e);
        return out;
    }
    PYCOMM_MEMBER void hold() {
        Packet<float, kCount> in[kHeld];
        if (reinterpret_cast<uintptr_t>(x) % sizeof(in[0]) == 0 && count >= place(kHeld - 1) + kCount) {
#pragma unroll
            for (int r = 0; r < kHeld; ++r)
                in[r] = reinterpret_cast<const Packet<float, kCount>*>(x)[place(r) / kCount];
        } else {
#pragma unroll
            for (int r = 0; r < kHeld; ++r) in[r] = load(r);
        }
#pragma unroll
        for (int r = 0; r < kHeld; ++r) {
#pragma unroll
            for (int e = 0; e < kCount; ++e) held[r * kCount + e] = chunk_key(in[r].values[e]);
        }
    }
    // Calls use(key) for this thread's elements, and perhaps for zeros.
    template <class Use>
    PYCOMM_MEMBER void for_keys(Use&& use) const {
#pragma unroll
        for (int i = 0; i < kHeld * kCount; ++i) use(held[i]);
        for (int r = kHeld; r < rounds(); ++r) {
            Packet<float, kCount> in = load(r);
#pragma unroll
            for (int e = 0; e < kCount; ++e) use(chunk_key(in.values[e]));
        }
    }
    // Of the whole chunk, for key > 0; every thread must call it.
    PYCOMM_MEMBER int count_from(uint32_t key) const {
        uint32_t mine = 0;
        for_keys([&](uint32_t one) { mine += one >= key ? 1 : 0; });
        return static_cast<int>(sum_of_block(mine));
    }
    // The k-th largest key.
    PYCOMM_MEMBER uint32_t kth_key(int k) const {
        uint32_t key = 0;
        for (uint32_t bit = 1u << 30; bit != 0; bit >>= 1) {
            if (count_from(key | bit) >= k) key |= bit;
        }
        return key;
    }
    PYCOMM_MEMBER uint32_t largest_key() const {
        PYCOMM_SHARED(uint32_t, largest, 1);
        uint32_t mine = 0;
        for_keys([&](uint32_t one) { mine = one > mine ? one : mine; });
        if (device::thread_index() == 0) *largest = 0;
        device::block_barrier();
        device::atomic_max(largest, mine);
        device::block_barrier();
        return *largest;
    }
};

// The two magnitudes of a chunk whose entries are those with keys above `kth`, and `ties` more with that key.
PYCOMM_DEVICE uint32_t word_of_chunk(const Chunk& chunk, int k, uint32_t kth, int ties, int bits) {
    const uint32_t top = chunk.largest_key();
    if (top >= kInf) return kNoFiniteWord;
    if (device::float_of(top) < kSmallestScale) return 0;
    if (bits > 2) return chunk_word(kth, top);
    uint64_t mine = 0;
    chunk.for_keys([&](uint32_t key) { mine += key > kth ? fixed_of(key, top) : 0; });
    const uint64_t equal = static_cast<uint64_t>(ties) * fixed_of(kth, top);
    const uint64_t total = sum_of_block(mine) + equal, mean = total / static_cast<uint64_t>(k);
    uint64_t mine_below = 0;  // the number in the upper bits: sums stay below 2^40
    chunk.for_keys([&](uint32_t key) {
        uint32_t fixed = fixed_of(key, top);
        if (key > kth && fixed <= mean) mine_below += uint64_t{1} << 44 | fixed;
    });
    const uint64_t below = sum_of_block(mine_below);
    const uint64_t sum_below = (below & ((uint64_t{1} << 44) - 1)) + equal;
    const uint64_t num_below = (below >> 44) + static_cast<uint64_t>(ties);
    const uint64_t num_above = static_cast<uint64_t>(k) - num_below, low = sum_below / num_below;
    const uint64_t high = num_above == 0 ? low : (total - sum_below) / num_above;
    const float unit = device::float_of(unit_bits_of(top));
    return chunk_word(device::bits_of(static_cast<float>(low) * unit),
                      device::bits_of(static_cast<float>(high) * unit));
}

// Adds bits to words that have zeros there.
PYCOMM_DEVICE void add_bits(uint32_t* words, int at, int width, uint32_t value) {
    device::atomic_add(&words[at / 32], value << (at % 32));
    if (at % 32 + width > 32) device::atomic_add(&words[at / 32 + 1], value >> (32 - at % 32));
}

// A block of threads per chunk.
PYCOMM_KERNEL pack_chunks_kernel(Chunking job) {
    const int64_t number = device::block_index();
    const ChunkLayout layout = number < job.whole ? job.each : job.last;
    const int64_t begin = number * job.each.count;
    uint32_t* const words = job.words + number * job.each.words;
    for (int w = 1 + device::thread_index(); w < layout.words; w += device::num_threads()) words[w] = 0;
    Chunk chunk{job.x + begin * static_cast<int64_t>(sizeof(float)), layout.count, {}};
    chunk.hold();
    const uint32_t kth = chunk.kth_key(layout.k);
    const int ties = layout.k - chunk.count_from(kth + 1);
    const uint32_t word = word_of_chunk(chunk, layout.k, kth, ties, job.bits);
    if (device::thread_index() == 0) words[0] = word;
    const ChunkLevels levels = levels_of_word(word, job.bits);
    const int width = layout.low + job.bits;
    uint64_t before = 0;  // entries above in the lower half, ties in the upper one
    for (int r = 0; r < chunk.rounds(); ++r) {
        Packet<float, Chunk::kCount> in = chunk.load(r);
        const int at = chunk.place(r);
        uint64_t mine = 0, in_round = 0;
#pragma unroll
        for (int e = 0; e < Chunk::kCount; ++e) {
            uint32_t key = chunk_key(in.values[e]);
            if (at + e < layout.count) mine += key > kth ? 1 : key == kth ? uint64_t{1} << 32 : 0;
        }
        uint64_t up_to_here = before + scan_block(mine, &in_round);
        before += in_round;
        auto m = static_cast<int>(up_to_here);
        int ties_left = ties - static_cast<int>(up_to_here >> 32);
        m += ties_left > 0 ? ties - ties_left : ties;
#pragma unroll
        for (int e = 0; e < Chunk::kCount; ++e) {
            const int index = at + e;
            const float value = in.values[e];
            const uint32_t key = chunk_key(value);
            float rest = value;
            if (index < layout.count && (key > kth || (key == kth && ties_left-- > 0))) {
                const uint32_t sign = device::bits_of(value) >> 31;
                const int level = level_of(levels, device::float_of(device::bits_of(value) & 0x7fffffffu));
                const uint32_t code = sign << (job.bits - 1) | static_cast<uint32_t>(level);
                const float magnitude = magnitude_of(levels, level);
                add_bits(words, 32 + (index >> layout.low) + m, 1, 1);
                add_bits(words, layout.fields_at + m * width, width,
                         (static_cast<uint32_t>(index) & ((1u << layout.low) - 1)) | code << layout.low);
                rest = value - (sign != 0 ? -magnitude : magnitude);
                ++m;
            }
            in.values[e] = rest * job.decay;
        }
        if (job.remainder != nullptr) store_before(begin + layout.count, job.remainder, begin + at, in);
    }
}

struct Unchunking {
    Arrays arrays;  // the contributions' words
    int num_contributions;
    int64_t whole;
    ChunkLayout each, last;
    int bits;
    char* out;
    int64_t count;
    Scale factor;
    Fault* fault;
};

PYCOMM_DEVICE uint32_t bits_at(const uint32_t* words, int at, int width) {
    uint64_t two = words[at / 32];
    if (at % 32 + width > 32) two |= static_cast<uint64_t>(words[at / 32 + 1]) << 32;
    return static_cast<uint32_t>(two >> (at % 32)) & ((1u << width) - 1);
}

// The entries of one chunk of one contribution.
struct ChunkEntries {
    const uint32_t* words;
    const ChunkLayout& layout;
    int bits;

    PYCOMM_MEMBER uint32_t upper(int word) const {
        int here = layout.upper_bits - word * 32;
        if (here <= 0) return 0;
        return words[1 + word] & (here >= 32 ? 0xffffffffu : (1u << here) - 1);
    }
    PYCOMM_MEMBER uint32_t field(int m) const {
        int width = layout.low + bits;
        return bits_at(words, layout.fields_at + m * width, width);
    }
    PYCOMM_MEMBER uint32_t lowest(int m) const { return field(m) & ((1u << layout.low) - 1); }

    // Adds them to `out`, which other threads of the block must not do meanwhile. Returns the number of entries, or a
    // negative one where pack_chunks cannot have made the words: for this thread's entries.
    PYCOMM_MEMBER int add_to(float* out) const {
        const ChunkLevels levels = levels_of_word(words[0], bits);
        int before = 0;  // entries in the upper bits before this round
        bool wrong = false;
        for (int base = 0; base < layout.upper_bits; base += device::num_threads()) {
            const int of_thread = device::thread_index() / 32;
            int m = before;
            uint32_t mine = 0;
            for (int w = 0; w < device::num_threads() / 32; ++w) {
                uint32_t word = upper(base / 32 + w);
                int ones = device::count_ones(word);
                m += w < of_thread ? ones : 0;
                before += ones;
                mine = w == of_thread ? word : mine;
            }
            const int bit = device::thread_index() % 32, at = base + device::thread_index();
            if ((mine >> bit & 1u) == 0) continue;
            m += device::count_ones(mine & ((1u << bit) - 1));
            if (m >= layout.k) {
                wrong = true;
                continue;
            }
            const uint32_t one = field(m), lowest_bits = one & ((1u << layout.low) - 1), code = one >> layout.low;
            const auto index = static_cast<int64_t>(at - m) << layout.low | lowest_bits;
            // Only neighbors among the upper bits may have the same higher ones.
            const bool has_neighbor = at > 0 && (upper((at - 1) / 32) >> ((at - 1) % 32) & 1u) != 0;
            if (index >= layout.count || (has_neighbor && lowest_bits <= lowest(m - 1))) {
                wrong = true;
                continue;
            }
            const float magnitude = magnitude_of(levels, static_cast<int>(code & ((1u << (bits - 1)) - 1)));
            out[index] = out[index] + (code >> (bits - 1) != 0 ? -magnitude : magnitude);
        }
        return wrong ? -1 : before;
    }
};

// A block of threads per chunk.
PYCOMM_KERNEL unpack_chunks_kernel(Unchunking job) {
    const int64_t number = device::block_index();
    const ChunkLayout layout = number < job.whole ? job.each : job.last;
    float* const out = reinterpret_cast<float*>(job.out) + number * job.each.count;
    const Factor factor(job.factor);
    for (int i = device::thread_index(); i < layout.count; i += device::num_threads()) out[i] = 0.0f;
    for (int p = 0; p < job.num_contributions; ++p) {
        device::block_barrier();
        auto words = reinterpret_cast<const uint32_t*>(job.arrays[p]) + number * job.each.words;
        if (ChunkEntries{words, layout, job.bits}.add_to(out) != layout.k) {
            report(job.fault, Mistake::kWordsOfChunks, p, 0, job.count);
        }
    }
    device::block_barrier();
    const float by = factor.as<float>();
    for (int i = device::thread_index(); i < layout.count; i += device::num_threads()) out[i] = out[i] * by;
}

}  // namespace

void pack_chunks(const Buffer& x, const ChunkFormat& config, uint32_t* words, float* remainder, float decay,
                 Stream stream) {
    if (x.count == 0) return;
    const ChunkLayouts layouts(config, x.count);
    Chunking job{
        x.bytes(), layouts.whole, layouts.each, layouts.last, config.bits, words, reinterpret_cast<char*>(remainder),
        decay};
    device::launch<pack_chunks_kernel>("pack_chunks", layouts.num_chunks(), stream, job);
}

int64_t unpack_chunks_workspace_bytes(std::size_t num_contributions) { return arrays_bytes(num_contributions); }

void unpack_chunks(const std::vector<const uint32_t*>& words, const ChunkFormat& config, const Buffer& out,
                   Scale factor, Workspace& workspace, Stream stream) {
    if (out.count == 0) return;
    const ChunkLayouts layouts(config, out.count);
    std::vector<Buffer> arrays;
    for (const uint32_t* p : words) arrays.push_back({const_cast<uint32_t*>(p), layouts.num_words(), DType::kI32});
    Unchunking job{arrays_of(arrays, workspace, stream),
                   static_cast<int>(words.size()),
                   layouts.whole,
                   layouts.each,
                   layouts.last,
                   config.bits,
                   out.bytes(),
                   out.count,
                   factor,
                   fault()};
    device::launch<unpack_chunks_kernel>("unpack_chunks", layouts.num_chunks(), stream, job);
}

}  // namespace pycomm::cuda
