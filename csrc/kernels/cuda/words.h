// The words that indices.h packs indices into, word by word and index by index.
#pragma once

#include <cstdint>

#include "device/intrinsics.h"
#include "kernels/cuda/faults.h"
#include "kernels/cuda/grid.h"
#include "kernels/indices.h"

namespace pycomm::cuda {

struct Packing {
    int64_t range, count;
    int low;
    int64_t lower_words, upper_words;
    Fault* fault;

    PYCOMM_MEMBER uint32_t mask() const { return (1u << low) - 1; }  // low <= 30
};

inline Packing packing_of(int64_t range, int64_t count) {
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
    int64_t m = count_before(packing.count, [&](int64_t i) { return bit_of(i) < word * 32; });
    uint32_t out = 0;
    for (; m < packing.count; ++m) {
        int64_t bit = bit_of(m) - word * 32;
        if (bit < 0 || bit >= 32) break;
        out |= 1u << bit;
    }
    return out;
}

// Writes all words; by thread `first` of `stride`.
PYCOMM_DEVICE void write_all_words(const Packing& packing, const int32_t* indices, uint32_t* words, int64_t first,
                                   int64_t stride) {
    for (int64_t w = first; w < packing.lower_words; w += stride) words[w] = lower_word(packing, indices, w);
    for (int64_t w = first; w < packing.upper_words; w += stride) {
        words[packing.lower_words + w] = upper_word(packing, indices, w);
    }
}

PYCOMM_DEVICE uint32_t lower_bits(const Packing& packing, const uint32_t* words, int64_t m) {
    if (packing.low == 0) return 0;
    int64_t at = m * packing.low;
    auto shift = static_cast<int>(at % 32);
    uint64_t two = words[at / 32];
    if (shift + packing.low > 32) two |= static_cast<uint64_t>(words[at / 32 + 1]) << 32;
    return static_cast<uint32_t>(two >> shift) & packing.mask();
}

// The number of bits that are set in upper words [begin, end), for all threads of the block.
PYCOMM_DEVICE int64_t count_upper_bits(const Packing& packing, const uint32_t* words, Part part) {
    const uint32_t* upper = words + packing.lower_words;
    uint64_t mine = 0, total = 0;
#pragma unroll 8
    for (int64_t w = part.begin + device::thread_index(); w < part.end; w += device::num_threads()) {
        mine += static_cast<uint64_t>(device::count_ones(upper[w]));
    }
    scan_block(mine, &total);
    return static_cast<int64_t>(total);
}

// The index m of the words, which has bit `bit` of the upper ones.
PYCOMM_DEVICE int64_t index_at(const Packing& packing, const uint32_t* words, int64_t m, int64_t bit) {
    return (bit - m) << packing.low | lower_bits(packing, words, m);
}

// The last bit before `bit` that is set in the upper words; there must be one.
PYCOMM_DEVICE int64_t bit_before(const uint32_t* upper, int64_t bit) {
    int64_t w = bit / 32;
    uint32_t bits = upper[w] & ((1u << (bit % 32)) - 1);
    while (bits == 0) bits = upper[--w];
    return w * 32 + device::highest_one(bits);
}

// Writes the indices whose bits lie in upper words `part`; `before` bits come before these. Calls then(m, the index
// before it or -1, index m) for each. Returns whether pack_indices cannot have made the words (with `once`: from
// different indices), and the number of bits up to the end of the part.
struct Unpacked {
    bool wrong;
    int64_t up_to_here;
};
template <class Then>
PYCOMM_DEVICE Unpacked unpack_part(const Packing& packing, const uint32_t* words, Part part, int64_t before,
                                   int32_t* indices, bool once, Then&& then) {
    const uint32_t* upper = words + packing.lower_words;
    bool wrong = false;
    int64_t at = before;
    for (int64_t base = part.begin; base < part.end; base += device::num_threads()) {
        int64_t w = base + device::thread_index();
        uint32_t bits = w < part.end ? upper[w] : 0;
        uint64_t in_round = 0;
        int64_t m = at + static_cast<int64_t>(scan_block(static_cast<uint64_t>(device::count_ones(bits)), &in_round));
        at += static_cast<int64_t>(in_round);
        int64_t previous = -1;
        if (bits != 0 && m > 0 && m < packing.count) {
            previous = index_at(packing, words, m - 1, bit_before(upper, w * 32 + device::lowest_one(bits)));
        }
        for (; bits != 0 && m < packing.count; bits &= bits - 1, ++m) {
            int64_t bit = w * 32 + device::lowest_one(bits);
            int64_t index = index_at(packing, words, m, bit);
            wrong = wrong || index >= packing.range || index < previous + (once ? 1 : 0);
            indices[m] = static_cast<int32_t>(index);
            then(m, previous, index);
            previous = index;
        }
    }
    return {wrong, at};
}

}  // namespace pycomm::cuda
