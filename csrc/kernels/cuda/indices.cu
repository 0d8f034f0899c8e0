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
PYCOMM_DEVICE uint32_t lower_word(const Packing& packing, const int32_t* indices, int64_t word) {
    uint32_t out = 0;
    for (int64_t m = word * 32 / packing.low; m < packing.count && m * packing.low < word * 32 + 32; ++m) {
        uint32_t value = static_cast<uint32_t>(indices[m]) & packing.mask();
        auto up = static_cast<int>(m * packing.low - word * 32);
        out |= up >= 0 ? value << up : value >> -up;
    }
    return out;
}

PYCOMM_DEVICE uint32_t upper_word(const Packing& packing, const int32_t* indices, int64_t word) {
    auto bit_of = [&](int64_t m) { return (static_cast<int64_t>(indices[m]) >> packing.low) + m; };
    int64_t m = 0;  // the first index whose bit is not before the word
    for (int64_t candidates = packing.count; candidates > 0;) {
        int64_t half = candidates / 2;
        if (bit_of(m + half) < word * 32) {
            m += half + 1;
            candidates -= half + 1;
        } else {
            candidates = half;
        }
    }
    uint32_t out = 0;
    for (; m < packing.count; ++m) {
        int64_t bit = bit_of(m) - word * 32;
        if (bit < 0 || bit >= 32) break;
        out |= 1u << bit;
    }
    return out;
}

PYCOMM_KERNEL pack_kernel(Packing packing, const int32_t* indices, uint32_t* words) {
    int64_t thread = static_cast<int64_t>(device::block_index()) * device::num_threads() + device::thread_index();
    int64_t stride = static_cast<int64_t>(device::num_blocks()) * device::num_threads();
    for (int64_t w = thread; w < packing.lower_words; w += stride) words[w] = lower_word(packing, indices, w);
    for (int64_t w = thread; w < packing.upper_words; w += stride) {
        words[packing.lower_words + w] = upper_word(packing, indices, w);
    }
    for (int64_t m = thread; m < packing.count; m += stride) {
        int32_t index = indices[m];
        if (index < (m == 0 ? 0 : indices[m - 1]) || index < 0 || index >= packing.range) {
            report(packing.fault, Mistake::kPackedIndex, m, index, packing.range);
        }
    }
}

// Counts the bits that are set in each block's part of the upper words.
PYCOMM_KERNEL count_kernel(Packing packing, const uint32_t* words, uint32_t* counts) {
    const uint32_t* upper = words + packing.lower_words;
    Part part = part_of(packing.upper_words);
    uint64_t mine = 0, in_block = 0;
    for (int64_t w = part.begin + device::thread_index(); w < part.end; w += device::num_threads()) {
        mine += static_cast<uint64_t>(device::count_ones(upper[w]));
    }
    scan_block(mine, &in_block);
    if (device::thread_index() == 0) counts[device::block_index()] = static_cast<uint32_t>(in_block);
}

PYCOMM_DEVICE uint32_t lower_bits(const Packing& packing, const uint32_t* words, int64_t m) {
    if (packing.low == 0) return 0;
    int64_t at = m * packing.low;
    auto shift = static_cast<int>(at % 32);
    uint64_t two = words[at / 32];
    if (shift + packing.low > 32) two |= static_cast<uint64_t>(words[at / 32 + 1]) << 32;
    return static_cast<uint32_t>(two >> shift) & packing.mask();
}

PYCOMM_KERNEL unpack_kernel(Packing packing, const uint32_t* words, const uint32_t* counts, int32_t* indices) {
    const uint32_t* upper = words + packing.lower_words;
    Part part = part_of(packing.upper_words);
    uint64_t before = 0, total = 0;
    sum_blocks(counts, &before, &total);
    bool wrong = total != static_cast<uint64_t>(packing.count);
    auto at = static_cast<int64_t>(before);
    for (int64_t base = part.begin; base < part.end; base += device::num_threads()) {
        int64_t w = base + device::thread_index();
        uint32_t bits = w < part.end ? upper[w] : 0;
        uint64_t in_round = 0;
        int64_t m = at + static_cast<int64_t>(scan_block(static_cast<uint64_t>(device::count_ones(bits)), &in_round));
        at += static_cast<int64_t>(in_round);
        for (; bits != 0 && m < packing.count; bits &= bits - 1, ++m) {
            int64_t high = w * 32 + device::lowest_one(bits) - m;
            int64_t index = high << packing.low | lower_bits(packing, words, m);
            wrong = wrong || index >= packing.range;
            indices[m] = static_cast<int32_t>(index);
        }
    }
    if (wrong) report(packing.fault, Mistake::kPackedWords, packing.count, 0, packing.range);
}

int64_t blocks_of_unpack(const Packing& packing) {
    int64_t blocks = blocks_for(packing.upper_words, device::threads_per_block() * int64_t{4});
    return blocks < kMostBlocks ? blocks : kMostBlocks;
}

}  // namespace

void pack_indices(const int32_t* indices, int64_t count, int64_t range, uint32_t* words, Stream stream) {
    Packing packing = packing_of(range, count);
    device::launch("pack_indices", pack_kernel, blocks_for(count, device::threads_per_block()), stream, packing,
                   indices, words);
}

int64_t unpack_indices_workspace_bytes(int64_t, int64_t) { return kMostBlocks * int64_t{sizeof(uint32_t)}; }

void unpack_indices(const uint32_t* words, int64_t count, int64_t range, int32_t* indices, Workspace& workspace,
                    Stream stream) {
    workspace.table.clear();  // overwritten
    Packing packing = packing_of(range, count);
    auto counts = reinterpret_cast<uint32_t*>(workspace.memory);
    int64_t blocks = blocks_of_unpack(packing);
    device::launch("unpack_indices", count_kernel, blocks, stream, packing, words, counts);
    device::launch("unpack_indices", unpack_kernel, blocks, stream, packing, words,
                   static_cast<const uint32_t*>(counts), indices);
}

}  // namespace pycomm::cuda
