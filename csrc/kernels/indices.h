// pack_indices, unpack_indices: encode ascending positions as bits, after Elias (1974) and Fano (1971).
//
// With low = floor(log2(range / count)) where range >= 2 * count, else 0, two arrays of 32-bit words, bits counted from
// the least significant:
//   lower: the `low` lowest bits of every index, one after the other, in ceil(count * low / 32) words
//   upper: bit (indices[m] >> low) + m is set for every m, in ceil((count + ((range - 1) >> low) + 1) / 32) words
// That is fewer than count * (low + 3) bits and two words, whatever the positions: at a density of 0.1 % 12 bits each.
// The size follows from range and count alone, so that it need not be sent. Equal neighbors are allowed.
//
// Eight indices have their lower bits in whole bytes, so that vectors take eight at a time, to pack where `low` is at
// most 14, to unpack where it is at most 25. Bound by instructions: with AVX2 50 and 53 for eight indices.
//
// An output overlaps no other array of the call.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm {

struct IndexLayout {
    int low;
    int64_t lower_words, upper_words;

    // 1 <= count, 1 <= range <= 2^31 - 1
    IndexLayout(int64_t range, int64_t count) : low(0) {
        while (count << (low + 1) <= range) ++low;
        lower_words = (count * low + 31) / 32;
        upper_words = (count + ((range - 1) >> low) + 1 + 31) / 32;
    }
    int64_t num_words() const { return lower_words + upper_words; }
};

// ArgumentError where the indices do not ascend, or lie outside [0, range).
void pack_indices(const int32_t* indices, int64_t count, int64_t range, uint32_t* words);
// ArgumentError where pack_indices cannot have made the words.
void unpack_indices(const uint32_t* words, int64_t count, int64_t range, int32_t* indices);

namespace cuda {

// A mistake is reported as a fault instead of an ArgumentError, and the words, or indices, are then meaningless.
void pack_indices(const int32_t* indices, int64_t count, int64_t range, uint32_t* words, Stream stream);
int64_t unpack_indices_workspace_bytes(int64_t count, int64_t range);
void unpack_indices(const uint32_t* words, int64_t count, int64_t range, int32_t* indices, Workspace& workspace,
                    Stream stream);

}  // namespace cuda
}  // namespace pycomm
