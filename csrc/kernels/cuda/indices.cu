#include "kernels/indices.h"

#include "device/launch.h"
#include "kernels/cuda/faults.h"
#include "kernels/cuda/grid.h"
#include "kernels/cuda/host.h"

namespace pycomm::cuda {
namespace {

constexpr int64_t kMostBlocks = 1024;  // of unpack: each of them adds up what all others counted

struct Packing {
    int64_t range, count;
    int low;
    int64_t lower_words, upper_words;
    Fault* fault;

    PYCOMM_MEMBER uint32_t mask() const { return (1u << low) - 1; }  // low <= 30
};

Packing packing_of(int64_t range, int64_t count) {
    IndexLayout layout(range, count);
    return {range, count, layout.low, layout.lower_words, layout.upper_words, fault()};
}

// Every word is made by one thread from the indices that reach into it: nothing has to be cleared, or agreed on.
PYCOMM_DEVICE uint32_t lower_word(const Packing& how, const int32_t* indices, int64_t word) {
    uint32_t out = 0;
    for (int64_t m = word * 32 / how.low; m < how.count && m * how.low < word * 32 + 32; ++m) {
        uint32_t value = static_cast<uint32_t>(indices[m]) & how.mask();
        auto up = static_cast<int>(m * how.low - word * 32);
        out |= up >= 0 ? value << up : value >> -up;
    }
    return out;
}

PYCOMM_DEVICE uint32_t upper_word(const Packing& how, const int32_t* indices, int64_t word) {
    auto bit_of = [&](int64_t m) { return (static_cast<int64_t>(indices[m]) >> how.low) + m; };
    int64_t m = 0;  // the first index whose bit is not before the word
    for (int64_t candidates = how.count; candidates > 0;) {
        int64_t half = candidates / 2;
        if (bit_of(m + half) < word * 32) {
            m += half + 1;
            candidates -= half + 1;
        } else {
            candidates = half;
        }
    }
    uint32_t out = 0;
    for (; m < how.count; ++m) {
        int64_t bit = bit_of(m) - word * 32;
        if (bit < 0 || bit >= 32) break;
        out |= 1u << bit;
    }
    return out;
}

PYCOMM_KERNEL pack_kernel(Packing how, const int32_t* indices, uint32_t* words) {
    int64_t thread = static_cast<int64_t>(device::block_index()) * device::num_threads() + device::thread_index();
    int64_t stride = static_cast<int64_t>(device::num_blocks()) * device::num_threads();
    for (int64_t w = thread; w < how.lower_words; w += stride) words[w] = lower_word(how, indices, w);
    for (int64_t w = thread; w < how.upper_words; w += stride) {
        words[how.lower_words + w] = upper_word(how, indices, w);
    }
    for (int64_t m = thread; m < how.count; m += stride) {
        int32_t index = indices[m];
        if (index < (m == 0 ? 0 : indices[m - 1]) || index < 0 || index >= how.range) {
            report(how.fault, Mistake::kPackedIndex, m, index, how.range);
        }
    }
}

// How many bits are set in each block's part of the upper words.
PYCOMM_KERNEL count_kernel(Packing how, const uint32_t* words, uint32_t* counts) {
    const uint32_t* upper = words + how.lower_words;
    Part part = part_of(how.upper_words);
    uint64_t mine = 0, in_block = 0;
    for (int64_t w = part.begin + device::thread_index(); w < part.end; w += device::num_threads()) {
        mine += static_cast<uint64_t>(device::count_ones(upper[w]));
    }
    scan_block(mine, &in_block);
    if (device::thread_index() == 0) counts[device::block_index()] = static_cast<uint32_t>(in_block);
}

PYCOMM_DEVICE uint32_t lower_bits(const Packing& how, const uint32_t* words, int64_t m) {
    if (how.low == 0) return 0;
    int64_t at = m * how.low;
    auto shift = static_cast<int>(at % 32);
    uint64_t two = words[at / 32];
    if (shift + how.low > 32) two |= static_cast<uint64_t>(words[at / 32 + 1]) << 32;
    return static_cast<uint32_t>(two >> shift) & how.mask();
}

PYCOMM_KERNEL unpack_kernel(Packing how, const uint32_t* words, const uint32_t* counts, int32_t* indices) {
    const uint32_t* upper = words + how.lower_words;
    Part part = part_of(how.upper_words);
    uint64_t before = 0, total = 0;
    sum_blocks(counts, &before, &total);
    bool wrong = total != static_cast<uint64_t>(how.count);
    auto at = static_cast<int64_t>(before);
    for (int64_t base = part.begin; base < part.end; base += device::num_threads()) {
        int64_t w = base + device::thread_index();
        uint32_t bits = w < part.end ? upper[w] : 0;
        uint64_t in_round = 0;
        int64_t m = at + static_cast<int64_t>(scan_block(static_cast<uint64_t>(device::count_ones(bits)), &in_round));
        at += static_cast<int64_t>(in_round);
        for (; bits != 0 && m < how.count; bits &= bits - 1, ++m) {
            int64_t high = w * 32 + device::lowest_one(bits) - m;
            int64_t index = high << how.low | lower_bits(how, words, m);
            wrong = wrong || index >= how.range;
            indices[m] = static_cast<int32_t>(index);
        }
    }
    if (wrong) report(how.fault, Mistake::kPackedWords, how.count, 0, how.range);
}

int64_t blocks_of_unpack(const Packing& how) {
    int64_t blocks = blocks_for(how.upper_words, device::threads_per_block() * int64_t{4});
    return blocks < kMostBlocks ? blocks : kMostBlocks;
}

}  // namespace

void pack_indices(const int32_t* indices, int64_t count, int64_t range, uint32_t* words, Stream stream) {
    Packing how = packing_of(range, count);
    device::launch("pack_indices", pack_kernel, blocks_for(count, device::threads_per_block()), stream, how, indices,
                   words);
}

int64_t unpack_indices_workspace_bytes(int64_t, int64_t) { return kMostBlocks * int64_t{sizeof(uint32_t)}; }

void unpack_indices(const uint32_t* words, int64_t count, int64_t range, int32_t* indices, Workspace& workspace,
                    Stream stream) {
    workspace.table.clear();  // overwritten
    Packing how = packing_of(range, count);
    auto counts = reinterpret_cast<uint32_t*>(workspace.memory);
    int64_t blocks = blocks_of_unpack(how);
    device::launch("unpack_indices", count_kernel, blocks, stream, how, words, counts);
    device::launch("unpack_indices", unpack_kernel, blocks, stream, how, words, static_cast<const uint32_t*>(counts),
                   indices);
}

}  // namespace pycomm::cuda
