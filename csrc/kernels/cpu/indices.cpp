#include "kernels/indices.h"

#include "base/error.h"
#include "kernels/cpu/loops/loops.h"

namespace pycomm {
namespace {

IndexCode code_of(int64_t range, int64_t count) {
    const IndexLayout layout(range, count);
    return {count, range, layout.low, layout.lower_words, layout.upper_words};
}

}  // namespace

void pack_indices(const int32_t* indices, int64_t count, int64_t range, uint32_t* words) {
    const int64_t m = loops().pack_indices(indices, code_of(range, count), words);
    if (m == count) return;
    throw ArgumentError(format("indices[%lld] is %lld, wanted %lld <= index < %lld, ascending",
                               static_cast<long long>(m), static_cast<long long>(indices[m]),
                               static_cast<long long>(m == 0 ? 0 : indices[m - 1]), static_cast<long long>(range)));
}

void unpack_indices(const uint32_t* words, int64_t count, int64_t range, int32_t* indices) {
    const IndexCode code = code_of(range, count);
    if (loops().unpack_indices(words, code, indices)) return;
    int64_t held = 0;
    for (int64_t w = 0; w < code.upper_words; ++w) held += __builtin_popcount(words[code.lower_words + w]);
    if (held == count) throw ArgumentError("words do not hold ascending indices below range");
    throw ArgumentError(format("words hold %s indices than count says", held > count ? "more" : "fewer"));
}

}  // namespace pycomm
