#include "kernels/cpu/loops/members.h"
#include "kernels/cpu/loops/simd.h"
#include "kernels/random.h"

namespace pycomm::PYCOMM_ISA {
namespace {

// Keys of the elements of a block, in two arrays so that they are loaded as vectors.
struct KeysOfElements {
    uint32_t a[kHashBlock], b[kHashBlock];
};

constexpr KeysOfElements make_keys() {
    KeysOfElements keys{};
    for (uint32_t j = 0; j < kHashBlock; ++j) {
        keys.a[j] = hash_keys(j).a;
        keys.b[j] = hash_keys(j).b;
    }
    return keys;
}

constexpr KeysOfElements kKeys = make_keys();

template <class Bits>
inline uint64_t term(const char* x, HashKeys block, int64_t j) {
    Bits bits;
    __builtin_memcpy(&bits, x, sizeof(Bits));
    return hash_term(bits, block, {kKeys.a[j], kKeys.b[j]});
}

// Bytes: the products take so long that a kilobyte would be needed before it has come (measured on Zen 4).
constexpr int64_t kDistance = 3072;

// The sum of one block's elements from `begin` to `end`, which begin at x. The compiler makes vectors of it.
template <class Bits>
uint64_t sum_in_block(const char* x, HashKeys block, int64_t begin, int64_t end) {
    constexpr int64_t kAtOnce = 64, kBytes = sizeof(Bits);
    uint64_t sum = 0;
    int64_t j = begin;
    for (; j + kAtOnce <= end; j += kAtOnce, x += kAtOnce * kBytes) {
        prefetch_ahead<kDistance>(x, kAtOnce * kBytes);
        for (int64_t u = 0; u < kAtOnce; ++u) sum += term<Bits>(x + u * kBytes, block, j + u);
    }
    for (; j < end; ++j, x += kBytes) sum += term<Bits>(x, block, j);
    return sum;
}

template <class Bits>
uint64_t hash_of(const char* x, int64_t count, int64_t first) {
    uint64_t sum = 0;
    for (int64_t i = first; i < first + count;) {
        int64_t begin = i % kHashBlock, left = first + count - i;
        int64_t end = begin + left < kHashBlock ? begin + left : kHashBlock;
        sum += sum_in_block<Bits>(x + (i - first) * static_cast<int64_t>(sizeof(Bits)),
                                  hash_keys_of_block(i / kHashBlock), begin, end);
        i += end - begin;
    }
    return sum;
}

}  // namespace

uint64_t hash(const void* x, int64_t itemsize, int64_t count, int64_t first) {
    auto bytes = static_cast<const char*>(x);
    switch (itemsize) {
        case 1:
            return hash_of<uint8_t>(bytes, count, first);
        case 2:
            return hash_of<uint16_t>(bytes, count, first);
        case 4:
            return hash_of<uint32_t>(bytes, count, first);
        default:
            return hash_of<uint64_t>(bytes, count, first);
    }
}

}  // namespace pycomm::PYCOMM_ISA
