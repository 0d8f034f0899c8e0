// Several arrays, which lie one after the other in a flat one, cut up over threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "base/parallel.h"
#include "kernels/cpu/loops/loops.h"

namespace pycomm {

// Outputs from this size on are evicted before anyone reads them, so they are streamed past the caches.
inline constexpr int64_t kStreamingBytes = 8 << 20;
inline Store store_of(const Buffer& out) {
    return out.num_bytes() >= kStreamingBytes ? Store::kStreaming : Store::kCached;
}

inline std::vector<int64_t> offsets_of(const std::vector<Buffer>& arrays) {
    std::vector<int64_t> offsets(arrays.size() + 1, 0);
    for (size_t j = 0; j < arrays.size(); ++j) offsets[j + 1] = offsets[j] + arrays[j].count;
    return offsets;
}

// Calls piece(j, range of the flat array) for the part of every array j that lies in `mine`, unless it is empty.
template <class Piece>
void for_pieces_of(const std::vector<int64_t>& offsets, Range mine, Piece&& piece) {
    auto j = static_cast<size_t>(std::upper_bound(offsets.begin(), offsets.end(), mine.begin) - offsets.begin()) - 1;
    for (; j + 1 < offsets.size() && offsets[j] < mine.end; ++j) {
        Range part{std::max(mine.begin, offsets[j]), std::min(mine.end, offsets[j + 1])};
        if (part.size() > 0) piece(j, part);
    }
}

inline const char* element_of(const Buffer& buffer, int64_t i) { return buffer.bytes() + i * size_of(buffer.dtype); }

}  // namespace pycomm
