#include "kernels/pack.h"

#include <atomic>

#include "base/parallel.h"
#include "kernels/cpu/loops/loops.h"
#include "kernels/cpu/pieces.h"
#include "kernels/unpack.h"

namespace pycomm {
namespace {

// Cuts the concatenation of `arrays` over threads and calls piece(array, begin in array, begin in flat, count). Returns
// whether all calls returned true.
template <class Piece>
bool for_pieces(const std::vector<Buffer>& arrays, int64_t total, int64_t num_bytes, int num_threads, Piece&& piece) {
    int threads = useful_threads(num_bytes, num_threads);
    std::vector<int64_t> offsets = offsets_of(arrays);
    std::atomic<bool> good{true};
    parallel_for(threads, threads, [&](int thread) {
        for_pieces_of(offsets, piece_of(total, thread, threads, 64), [&](size_t j, Range part) {
            if (!piece(arrays[j], part.begin - offsets[j], part.begin, part.size())) good = false;
        });
    });
    return good;
}

}  // namespace

bool pack(const std::vector<Buffer>& srcs, const Buffer& out, double scale, double limit, int num_threads) {
    Store mode = out.num_bytes() >= kStreamingBytes ? Store::kStreaming : Store::kCached;
    return for_pieces(
        srcs, out.count, out.num_bytes(), num_threads, [&](const Buffer& src, int64_t from, int64_t to, int64_t count) {
            return loops().convert(element_of(src, from), src.dtype, const_cast<char*>(element_of(out, to)), out.dtype,
                                   count, scale, limit, mode);
        });
}

void unpack(const Buffer& flat, const std::vector<Buffer>& outs, double scale, int num_threads) {
    Store mode = flat.num_bytes() >= kStreamingBytes ? Store::kStreaming : Store::kCached;
    for_pieces(outs, flat.count, flat.num_bytes(), num_threads,
               [&](const Buffer& out, int64_t to, int64_t from, int64_t count) {
                   loops().convert(element_of(flat, from), flat.dtype, const_cast<char*>(element_of(out, to)),
                                   out.dtype, count, scale, kNoLimit, mode);
                   return true;
               });
}

}  // namespace pycomm
