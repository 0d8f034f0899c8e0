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

constexpr int64_t kRun = 16;  // elements

// A sum of the terms of runs. The compiler makes vectors of it.
template <class Bits>
class RunningSum {
   public:
    void add(const char* x, HashKeys block, int64_t j) {
        for (int64_t u = 0; u < kRun; ++u) sum_ += term<Bits>(x + u * static_cast<int64_t>(sizeof(Bits)), block, j + u);
    }
    uint64_t total() const { return sum_; }

   private:
    uint64_t sum_ = 0;
};

#if defined(PYCOMM_ISA_AVX2)
// The products of even and odd elements apart: the compiler's own vectors take twice as many instructions.
template <>
class RunningSum<uint32_t> {
   public:
    void add(const char* x, HashKeys block, int64_t j) {
        for (int64_t u = 0; u < kRun; u += 8) {
            __m256i low = _mm256_add_epi32(load_eight(kKeys.a + j + u), _mm256_set1_epi32(static_cast<int>(block.a)));
            __m256i high = _mm256_add_epi32(load_eight(kKeys.b + j + u), _mm256_set1_epi32(static_cast<int>(block.b)));
            low = _mm256_add_epi32(low, load_eight(x + 4 * u));
            even_ = _mm256_add_epi64(even_, _mm256_mul_epu32(low, high));
            odd_ = _mm256_add_epi64(odd_, _mm256_mul_epu32(_mm256_srli_epi64(low, 32), _mm256_srli_epi64(high, 32)));
        }
    }
    uint64_t total() const {
        uint64_t sums[4];
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), _mm256_add_epi64(even_, odd_));
        return sums[0] + sums[1] + sums[2] + sums[3];
    }

   private:
    static __m256i load_eight(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
    __m256i even_ = _mm256_setzero_si256(), odd_ = _mm256_setzero_si256();
};
#endif

// The sum of kStreams times kBlocks whole blocks, from block n on: kStreams of them, far apart, at a time.
constexpr int64_t kBlocks = kStretch / kHashBlock;

template <class Bits>
uint64_t sum_of_blocks(const char* x, int64_t n) {
    constexpr int64_t kBytes = sizeof(Bits);
    RunningSum<Bits> sums[kStreams];
    for (int64_t b = 0; b < kBlocks; ++b) {
        HashKeys blocks[kStreams];
        for (int64_t s = 0; s < kStreams; ++s) blocks[s] = hash_keys_of_block(n + s * kBlocks + b);
        for (int64_t j = 0; j < kHashBlock; j += kRun) {
            for (int64_t s = 0; s < kStreams; ++s) {
                const char* from = x + ((s * kBlocks + b) * kHashBlock + j) * kBytes;
                prefetch_stream<kDistance>(from, kRun * kBytes);
                sums[s].add(from, blocks[s], j);
            }
        }
    }
    uint64_t sum = 0;
    for (const auto& of_stream : sums) sum += of_stream.total();
    return sum;
}

template <class Bits>
uint64_t hash_of(const char* x, int64_t count, int64_t first) {
    uint64_t sum = 0;
    for (int64_t i = first; i < first + count;) {
        const char* from = x + (i - first) * static_cast<int64_t>(sizeof(Bits));
        if (i % kHashBlock == 0 && first + count - i >= kStreams * kStretch) {
            sum += sum_of_blocks<Bits>(from, i / kHashBlock);
            i += kStreams * kStretch;
            continue;
        }
        int64_t begin = i % kHashBlock, left = first + count - i;
        int64_t end = begin + left < kHashBlock ? begin + left : kHashBlock;
        sum += sum_in_block<Bits>(from, hash_keys_of_block(i / kHashBlock), begin, end);
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
