#include <cstddef>

#if defined(PYCOMM_ISA_AVX512) || defined(PYCOMM_ISA_AVX2)
#include <immintrin.h>
#endif

#include "kernels/cpu/loops/members.h"

namespace pycomm::PYCOMM_ISA {
namespace {

// Writes the indices from m to `end`, after those before are written. Returns the place of the first index that is
// wrong, or end.
int64_t pack_one_by_one(const int32_t* indices, const IndexCode& code, int64_t m, int64_t end, uint32_t* words) {
    uint32_t* const upper = words + code.lower_words;
    const uint64_t mask = (uint64_t{1} << code.low) - 1;
    uint32_t* next = words + m * code.low / 32;
    int num_pending = static_cast<int>(m * code.low % 32);
    // Lower bits that do not fill a word yet.
    uint64_t pending = num_pending == 0 ? 0 : *next & ((1u << num_pending) - 1u);
    int64_t before = m == 0 ? 0 : indices[m - 1];
    for (; m < end; ++m) {
        const int64_t index = indices[m];
        if (index < before || index >= code.range) return m;
        before = index;
        const int64_t bit = (index >> code.low) + m;
        upper[bit / 32] |= 1u << (bit % 32);
        pending |= (static_cast<uint64_t>(index) & mask) << num_pending;
        num_pending += code.low;
        if (num_pending >= 32) {
            *next++ = static_cast<uint32_t>(pending);
            pending >>= 32;
            num_pending -= 32;
        }
    }
    if (num_pending > 0) *next = static_cast<uint32_t>(pending);
    return m;
}

// The lower bits of index m.
inline int64_t lower_of(const uint32_t* words, const IndexCode& code, int64_t m) {
    if (code.low == 0) return 0;
    const int64_t at = m * code.low;
    uint64_t bits = words[at / 32];
    if (at % 32 + code.low > 32) bits |= static_cast<uint64_t>(words[at / 32 + 1]) << 32;
    return static_cast<int64_t>(bits >> (at % 32) & ((uint64_t{1} << code.low) - 1));
}

// Index m, whose upper part is known.
inline int32_t index_of(const uint32_t* words, const IndexCode& code, int64_t m, int64_t upper) {
    return static_cast<int32_t>(upper << code.low | lower_of(words, code, m));
}

bool ascend(const int32_t* indices, int64_t begin, int64_t end) {
    int32_t falls = 0;  // as wide as an index, so that the compiler makes vectors of it
    for (int64_t m = begin > 0 ? begin : 1; m < end; ++m) falls |= indices[m - 1] > indices[m] ? -1 : 0;
    return falls == 0;
}

#if defined(PYCOMM_ISA_AVX512) || defined(PYCOMM_ISA_AVX2)

// Eight indices at a time: their lower bits fill `low` whole bytes.
constexpr int kEight = 8;

inline __m256i load_eight(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline __m128i load_four(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
inline __m256i all_eight(int64_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline bool is_zero(__m256i x) { return _mm256_testz_si256(x, x) != 0; }

// Blocks of kPacked indices whose upper bits lie within kMarks are packed together.
constexpr int64_t kPacked = 256, kMarks = 2048;
constexpr int kMostPacked = 14;  // lower bits of each: pairs of them are joined by products of int16

// Writes the lower bits of kPacked indices, after those before are written, and 16 - `low` bytes of zeros. Returns
// whether these and the one before ascend.
bool pack_lower(const int32_t* indices, int low, char* to) {
    const __m256i mask = all_eight((1 << low) - 1), pair = all_eight(1 | 1 << (low + 16));
    const __m256i up = _mm256_set1_epi64x(32 - 2 * low);
    const __m128i down = _mm_cvtsi32_si128(32 - 2 * low), four = _mm_cvtsi32_si128(4 * low);
    const __m128i rest = _mm_cvtsi32_si128(64 - 4 * low);
    __m256i falls = all_eight(0);
    for (int64_t m = 0; m < kPacked; m += 2 * kEight, to += 2 * low) {
        const __m256i first = load_eight(indices + m), second = load_eight(indices + m + kEight);
        falls = _mm256_or_si256(falls, _mm256_cmpgt_epi32(load_eight(indices + m - 1), first));
        falls = _mm256_or_si256(falls, _mm256_cmpgt_epi32(load_eight(indices + m + kEight - 1), second));
        // Pairs in 32 bits, then pairs of pairs in 64, then eights.
        __m256i bits = _mm256_packus_epi32(_mm256_and_si256(first, mask), _mm256_and_si256(second, mask));
        bits = _mm256_madd_epi16(bits, pair);
        bits = _mm256_srl_epi64(_mm256_sllv_epi32(bits, up), down);
        const __m128i lower = _mm256_castsi256_si128(bits), upper = _mm256_extracti128_si256(bits, 1);
        const __m128i begin = _mm_or_si128(lower, _mm_sll_epi64(upper, four)), end = _mm_srl_epi64(upper, rest);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi64(begin, end));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + low), _mm_unpackhi_epi64(begin, end));
    }
    return is_zero(falls);
}

// Sets the byte of every upper bit of kPacked indices.
inline void mark(const int32_t* indices, int low, uint8_t* marks, int64_t first) {
    for (int64_t m = 0; m < kPacked; m += kEight) {
        for (int64_t j = m; j < m + kEight; ++j) marks[first + j + (static_cast<uint32_t>(indices[j]) >> low)] = 0xff;
    }
}

// Writes whole blocks from m > 0 on, which is an eight's beginning, while they are right and their upper bits lie close
// together. Returns where it ended.
int64_t pack_blocks(const int32_t* indices, const IndexCode& code, int64_t m, uint32_t* words) {
    uint32_t* const upper = words + code.lower_words;
    const int low = code.low;
    const int64_t last_byte = 4 * code.lower_words - (kPacked / kEight - 1) * low - 16;
    auto place_of = [&](int64_t at) { return (static_cast<uint32_t>(indices[at]) >> low) + static_cast<uint64_t>(at); };
    uint8_t marks[kMarks] = {};
    for (; m + kPacked <= code.count && m / kEight * low <= last_byte; m += kPacked) {
        if (!pack_lower(indices + m, low, reinterpret_cast<char*>(words) + m / kEight * low)) break;
        if (indices[m + kPacked - 1] >= code.range) break;
        const auto word = static_cast<int64_t>(place_of(m) / 32);
        const int64_t num_words = static_cast<int64_t>(place_of(m + kPacked - 1) / 32) + 1 - word;
        if (num_words > kMarks / 32) break;
        mark(indices + m, low, marks, m - 32 * word);
        for (int64_t w = 0; w < num_words; ++w) {
            upper[word + w] |= static_cast<uint32_t>(_mm256_movemask_epi8(load_eight(marks + 32 * w)));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(marks + 32 * w), all_eight(0));
        }
    }
    return m;
}

// Takes the lower bits of eight indices, up to 25 each, out of the bytes where they begin.
class LowerBits {
   public:
    explicit LowerBits(int low)
        : second_at_(4 * low / 8), ones_(all_eight((1 << low) - 1)), bytes_(all_eight(0)), shifts_(all_eight(0)) {
        uint8_t bytes[32];
        uint32_t shifts[8];
        for (int i = 0; i < kEight; ++i) {
            int bit = i * low - (i < 4 ? 0 : 8 * second_at_);
            for (int b = 0; b < 4; ++b) bytes[4 * i + b] = static_cast<uint8_t>(bit / 8 + b);
            shifts[i] = static_cast<uint32_t>(bit % 8);
        }
        bytes_ = load_eight(bytes);
        shifts_ = load_eight(shifts);
    }

    int64_t bytes_read() const { return second_at_ + 16; }
    __m256i at(const char* from) const {
        __m256i bits =
            _mm256_inserti128_si256(_mm256_castsi128_si256(load_four(from)), load_four(from + second_at_), 1);
        return _mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(bits, bytes_), shifts_), ones_);
    }

   private:
    int second_at_;  // bytes; a shuffle stays within 16
    __m256i ones_, bytes_, shifts_;
};

// The upper parts of indices are the numbers of bits not set before theirs. Row m of `before`: this number for each
// bit that is set in m, lowest first. Row n of `all`: eight times the number of unset bits in a byte with n set.
struct alignas(32) ZeroBits {
    uint32_t all[9][8];
    uint8_t before[256][8];
};

constexpr ZeroBits make_zero_bits() {
    ZeroBits table{};
    for (uint32_t n = 0; n <= 8; ++n) {
        for (uint32_t& zeros : table.all[n]) zeros = 8 - n;
    }
    for (int mask = 0; mask < 256; ++mask) {
        int found = 0;
        for (int bit = 0; bit < 8; ++bit) {
            if ((mask >> bit & 1) == 0) continue;
            table.before[mask][found] = static_cast<uint8_t>(bit - found);
            ++found;
        }
    }
    return table;
}

constexpr ZeroBits kZeroBits = make_zero_bits();

// Upper parts that are yet to be joined with lower ones.
struct UpperParts {
    static constexpr int64_t kMost = 1024;
    uint32_t parts[kMost + 32 + kEight];
    int64_t count = 0;
    __m256i zeros = all_eight(0);  // bits not set before

    // Appends the parts of the bytes from `byte` on, which are fours, until there are kMost. Returns how many bytes.
    int64_t read(const uint8_t* byte, int64_t num_bytes) {
        __m256i before = zeros;
        int64_t found = count, b = 0;  // not in memory: every store might change that
        uint32_t* const to = parts;
        auto append = [&](uint32_t of_byte) {
            const auto row = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kZeroBits.before[of_byte]));
            const __m256i all = _mm256_add_epi32(before, _mm256_cvtepu8_epi32(row));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + found), all);
            const auto set = static_cast<uint32_t>(__builtin_popcount(of_byte));
            before = _mm256_add_epi32(before, load_eight(kZeroBits.all[set]));
            found += set;
        };
        for (; b < num_bytes && found < kMost; b += 4) {
            append(byte[b]);
            append(byte[b + 1]);
            append(byte[b + 2]);
            append(byte[b + 3]);
        }
        count = found;
        zeros = before;
        return b;
    }
    void drop(int64_t used) {
        count -= used;
        for (int64_t j = 0; j < count; ++j) parts[j] = parts[used + j];
    }
};

// Writes all indices; false if they do not ascend, or are not as many as they should be.
bool unpack_pieces(const uint32_t* words, const IndexCode& code, int32_t* indices) {
    const LowerBits lower(code.low);
    const __m128i low = _mm_cvtsi32_si128(code.low);
    const int64_t step = code.low;
    // Where lower bits of eight may be loaded, at most.
    const int64_t last = 4 * (code.lower_words + code.upper_words) - lower.bytes_read();
    const auto lowest = reinterpret_cast<const char*>(words);
    const auto bytes = reinterpret_cast<const uint8_t*>(words + code.lower_words);
    UpperParts upper;
    int64_t m = 0;
    for (int64_t byte = 0, num_bytes = 4 * code.upper_words; byte < num_bytes;) {
        byte += upper.read(bytes + byte, num_bytes - byte);
        if (m + upper.count > code.count) return false;
        const int64_t begin = m;
        int64_t at = m / kEight * step, eights = at > last ? 0 : (last - at) / step + 1;
        if (eights > upper.count / kEight) eights = upper.count / kEight;
        int64_t used = eights * kEight;
        for (int64_t j = 0; j < used; j += kEight, at += step) {
            const __m256i index =
                _mm256_or_si256(_mm256_sll_epi32(load_eight(upper.parts + j), low), lower.at(lowest + at));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(indices + m + j), index);
        }
        m += used;
        // The last ones, whose lower bits are too near to the end.
        for (; used + kEight <= upper.count || (byte == num_bytes && used < upper.count); ++used, ++m) {
            indices[m] = index_of(words, code, m, upper.parts[used]);
        }
        upper.drop(used);
        if (!ascend(indices, begin, m)) return false;
    }
    return m == code.count;
}

#endif

}  // namespace

int64_t pack_indices(const int32_t* indices, const IndexCode& code, uint32_t* words) {
    __builtin_memset(words + code.lower_words, 0, static_cast<size_t>(code.upper_words) * sizeof(uint32_t));
    int64_t m = 0;
#if defined(PYCOMM_ISA_AVX512) || defined(PYCOMM_ISA_AVX2)
    while (code.low > 0 && code.low <= kMostPacked && m + kPacked <= code.count) {
        if (m > 0) m = pack_blocks(indices, code, m, words);
        int64_t end = m == 0 ? kEight : m + kPacked;
        if (end > code.count) end = code.count;
        const int64_t right = pack_one_by_one(indices, code, m, end, words);
        if (right < end) return right;
        m = end;
    }
#endif
    return pack_one_by_one(indices, code, m, code.count, words);
}

bool unpack_indices(const uint32_t* words, const IndexCode& code, int32_t* indices) {
    const uint32_t* const upper = words + code.lower_words;
    // The first place that no index can have; none is beyond the last word.
    const int64_t end = code.count + ((code.range - 1) >> code.low);
    if (upper[end / 32] >> (end % 32) != 0) return false;
    int64_t m = 0, w = 0;
#if defined(PYCOMM_ISA_AVX512) || defined(PYCOMM_ISA_AVX2)
    if (code.low > 0 && code.low <= 25) {
        if (!unpack_pieces(words, code, indices)) return false;
        return indices[code.count - 1] < code.range;
    }
#endif
    for (; w < code.upper_words; ++w) {
        for (uint32_t bits = upper[w]; bits != 0; bits &= bits - 1, ++m) {
            if (m == code.count) return false;
            indices[m] = index_of(words, code, m, w * 32 + __builtin_ctz(bits) - m);
        }
    }
    return m == code.count && ascend(indices, 0, m) && indices[m - 1] < code.range;
}

}  // namespace pycomm::PYCOMM_ISA
