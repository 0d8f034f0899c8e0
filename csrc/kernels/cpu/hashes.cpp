#include "kernels/hashes.h"

#include <atomic>

#include "kernels/cpu/loops/loops.h"
#include "kernels/cpu/pieces.h"

namespace pycomm {

void hashes(const std::vector<Buffer>& arrays, uint64_t* out, int num_threads) {
    std::vector<int64_t> offsets = offsets_of(arrays);
    int64_t num_bytes = 0;
    for (const Buffer& array : arrays) num_bytes += array.num_bytes();
    std::vector<std::atomic<uint64_t>> sums(arrays.size());
    int threads = useful_threads(num_bytes, num_threads);
    parallel_for(threads, threads, [&](int thread) {
        for_pieces_of(offsets, piece_of(offsets.back(), thread, threads, 64), [&](size_t j, Range part) {
            Range mine{part.begin - offsets[j], part.end - offsets[j]};
            sums[j] +=
                loops().hash(element_of(arrays[j], mine.begin), size_of(arrays[j].dtype), mine.size(), mine.begin);
        });
    });
    for (size_t j = 0; j < arrays.size(); ++j) out[j] = sums[j];
}

}  // namespace pycomm
