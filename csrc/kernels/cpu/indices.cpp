#include "kernels/indices.h"

#include <cstring>

#include "base/error.h"

namespace pycomm {

void pack_indices(const int32_t* indices, int64_t count, int64_t range, uint32_t* words) {
    const IndexLayout layout(range, count);
    std::memset(words, 0, static_cast<size_t>(layout.num_words()) * sizeof(uint32_t));
    uint32_t* upper = words + layout.lower_words;
    const uint64_t mask = (uint64_t{1} << layout.low) - 1;
    uint64_t pending = 0;  // lower bits that do not fill a word yet
    int num_pending = 0;
    uint32_t* next = words;
    int64_t before = 0;
    for (int64_t m = 0; m < count; ++m) {
        const int64_t index = indices[m];
        if (index < before || index >= range) {
            throw ArgumentError(format("indices[%lld] is %lld, wanted %lld <= index < %lld, ascending",
                                       static_cast<long long>(m), static_cast<long long>(index),
                                       static_cast<long long>(before), static_cast<long long>(range)));
        }
        before = index;
        const int64_t bit = (index >> layout.low) + m;
        upper[bit / 32] |= 1u << (bit % 32);
        pending |= (static_cast<uint64_t>(index) & mask) << num_pending;
        num_pending += layout.low;
        if (num_pending >= 32) {
            *next++ = static_cast<uint32_t>(pending);
            pending >>= 32;
            num_pending -= 32;
        }
    }
    if (num_pending > 0) *next = static_cast<uint32_t>(pending);
}

void unpack_indices(const uint32_t* words, int64_t count, int64_t range, int32_t* indices) {
    const IndexLayout layout(range, count);
    const uint32_t* upper = words + layout.lower_words;
    const uint64_t mask = (uint64_t{1} << layout.low) - 1;
    int64_t m = 0;
    int64_t before = 0;
    for (int64_t w = 0; w < layout.upper_words; ++w) {
        for (uint32_t bits = upper[w]; bits != 0; bits &= bits - 1, ++m) {
            if (m == count) throw ArgumentError("words hold more indices than count says");
            const int64_t at = m * layout.low;
            uint64_t lower = 0;
            if (layout.low > 0) {
                lower = words[at / 32];
                if (at % 32 + layout.low > 32) lower |= static_cast<uint64_t>(words[at / 32 + 1]) << 32;
                lower = lower >> (at % 32) & mask;
            }
            const int64_t index = (w * 32 + __builtin_ctz(bits) - m) << layout.low | static_cast<int64_t>(lower);
            if (index < before || index >= range)
                throw ArgumentError("words do not hold ascending indices below range");
            before = index;
            indices[m] = static_cast<int32_t>(index);
        }
    }
    if (m < count) throw ArgumentError("words hold fewer indices than count says");
}

}  // namespace pycomm
