#include "kernels/pack.h"

#include <algorithm>
#include <atomic>

#include "base/parallel.h"
#include "kernels/cpu/loops/loops.h"
#include "kernels/unpack.h"

namespace pycomm {
namespace {

// Outputs beyond this size leave the caches before anyone reads them, so they are streamed past.
constexpr int64_t kStreamingBytes = 8 << 20;

// Cuts the concatenation of `arrays` over threads and calls piece(array, begin in array, begin in flat, count), which
// returns whether it went well; the conjunction comes back.
template <class Piece>
bool for_pieces(const std::vector<Buffer>& arrays, int64_t total, int64_t num_bytes, int num_threads, Piece&& piece) {
    int threads = useful_threads(num_bytes, num_threads);
    std::vector<int64_t> offsets(arrays.size() + 1, 0);
    for (size_t j = 0; j < arrays.size(); ++j) offsets[j + 1] = offsets[j] + arrays[j].count;
    std::atomic<bool> good{true};
    parallel_for(threads, threads, [&](int thread) {
        Range mine = piece_of(total, thread, threads, 64);
        size_t j =
            static_cast<size_t>(std::upper_bound(offsets.begin(), offsets.end(), mine.begin) - offsets.begin()) - 1;
        for (; j < arrays.size() && offsets[j] < mine.end; ++j) {
            int64_t begin = std::max(mine.begin, offsets[j]);
            int64_t end = std::min(mine.end, offsets[j + 1]);
            if (begin < end && !piece(arrays[j], begin - offsets[j], begin, end - begin)) good = false;
        }
    });
    return good;
}

const char* at(const Buffer& buffer, int64_t element) { return buffer.bytes() + element * size_of(buffer.dtype); }

}  // namespace

bool pack(const std::vector<Buffer>& srcs, const Buffer& out, double scale, int num_threads) {
    Store mode = out.num_bytes() >= kStreamingBytes ? Store::kStreaming : Store::kCached;
    return for_pieces(srcs, out.count, out.num_bytes(), num_threads,
                      [&](const Buffer& src, int64_t from, int64_t to, int64_t count) {
                          return loops().convert(at(src, from), src.dtype, const_cast<char*>(at(out, to)), out.dtype,
                                                 count, scale, mode);
                      });
}

void unpack(const Buffer& flat, const std::vector<Buffer>& outs, double scale, int num_threads) {
    Store mode = flat.num_bytes() >= kStreamingBytes ? Store::kStreaming : Store::kCached;
    for_pieces(outs, flat.count, flat.num_bytes(), num_threads,
               [&](const Buffer& out, int64_t to, int64_t from, int64_t count) {
                   loops().convert(at(flat, from), flat.dtype, const_cast<char*>(at(out, to)), out.dtype, count, scale,
                                   mode);
                   return true;
               });
}

}  // namespace pycomm
