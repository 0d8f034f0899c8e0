#include "kernels/pack.h"

#include <algorithm>
#include <atomic>
#include <cstring>

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

void write_flags(const std::vector<Buffer>& srcs, DType dtype, PackFlags flags, bool all_finite) {
    std::vector<float> values;
    for (const Buffer& src : srcs) values.push_back(src.data != nullptr ? 1.0f : 0.0f);
    values.push_back(all_finite ? 0.0f : 1.0f);
    for (bool inverted : {false, true}) {
        for (int i = 0; i < flags.num_bits; ++i) {
            values.push_back(flags.bits != nullptr && flags.bits[i] != inverted ? 1.0f : 0.0f);
        }
    }
    loops().convert(reinterpret_cast<const char*>(values.data()), DType::kF32, flags.out, dtype,
                    static_cast<int64_t>(values.size()), 1.0, kNoLimit, Store::kCached);
}

}  // namespace

bool pack(const std::vector<Buffer>& srcs, const Buffer& out, PackFlags flags, double scale, double limit,
          int num_threads, Range skip) {
    const Store mode = store_of(out);
    auto pack_part = [&](const Buffer& src, int64_t from, int64_t to, int64_t count) {
        char* dst = const_cast<char*>(element_of(out, to));
        if (src.data == nullptr) {
            std::memset(dst, 0, static_cast<size_t>(count * size_of(out.dtype)));
            return true;
        }
        const bool stays = element_of(src, from) == dst && src.dtype == out.dtype && scale == 1.0;
        if (stays && src.dtype != DType::kF64) return loops().absmax(dst, src.dtype, count) < limit;
        return loops().convert(element_of(src, from), src.dtype, dst, out.dtype, count, scale, limit, mode);
    };
    const bool all = for_pieces(
        srcs, out.count, out.num_bytes(), num_threads, [&](const Buffer& src, int64_t from, int64_t to, int64_t count) {
            const int64_t end = to + count, before = std::min(end, skip.begin), behind = std::max(to, skip.end);
            bool good = true;
            if (before > to) good = pack_part(src, from, to, before - to);
            if (end > behind) good = pack_part(src, from + behind - to, behind, end - behind) && good;
            return good;
        });
    if (flags.out != nullptr) write_flags(srcs, out.dtype, flags, all);
    return all;
}

void unpack(const Buffer& flat, const std::vector<Buffer>& outs, double scale, int num_threads) {
    const Store mode = store_of(flat);
    for_pieces(outs, flat.count, flat.num_bytes(), num_threads,
               [&](const Buffer& out, int64_t to, int64_t from, int64_t count) {
                   loops().convert(element_of(flat, from), flat.dtype, const_cast<char*>(element_of(out, to)),
                                   out.dtype, count, scale, kNoLimit, mode);
                   return true;
               });
}

}  // namespace pycomm
