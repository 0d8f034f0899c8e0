// Bits of consecutive elements, made by lanes that have four of them each.
#pragma once

#include <cstdint>

#include "device/intrinsics.h"

namespace pycomm::cuda {

// A warp works on kRows rows of 32 * 4 elements: as many as make a load of 16 bytes each for floats.
inline constexpr int kRows = 4;
inline constexpr int kRowElems = device::kWarpSize * 4;
inline constexpr int kChunkElems = kRows * kRowElems;
inline constexpr int kChunkWords = kChunkElems / 32;

// Element 4 * lane + e of row r is bit e of this lane's bits[r]. Writes the words of the chunk, the lowest bit first,
// but not more than num_words.
PYCOMM_DEVICE void write_words(const uint32_t (&bits)[kRows], uint32_t* words, int64_t num_words) {
    int lane = device::thread_index() % device::kWarpSize, of_word = lane % 8;
    uint32_t mine = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        uint32_t word = bits[r] << (4 * of_word);  // eight lanes make a word; in the end all of them have it
        for (int distance = 1; distance < 8; distance *= 2) word |= device::shuffle(word, lane ^ distance);
        if (of_word == r) mine = word;
    }
    int word = of_word * 4 + lane / 8;
    if (of_word < kRows && word < num_words) words[word] = mine;
}

}  // namespace pycomm::cuda
