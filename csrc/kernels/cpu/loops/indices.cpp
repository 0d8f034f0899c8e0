#include <cstddef>

#include "kernels/cpu/loops/members.h"
#include "kernels/cpu/loops/set_bits.h"

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

#if defined(PYCOMM_ISA_AVX512) || defined(PYCOMM_ISA_AVX2)

// Eight indices at a time: their lower bits fill `low` whole bytes.
constexpr int kEight = 8;

inline __m256i load_eight(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline __m256i all_eight(int64_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline __m256i first_eight() { return _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0); }
inline uint64_t either(__m256i quarters) {
    __m128i halves = _mm_or_si128(_mm256_castsi256_si128(quarters), _mm256_extracti128_si256(quarters, 1));
    return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_or_si128(halves, _mm_unpackhi_epi64(halves, halves))));
}

// Up to 15 lower bits of each index: pairs are joined, then pairs of pairs. Writes 16 bytes.
inline void put_lower(__m256i indices, int low, char* to) {
    __m256i bits = _mm256_and_si256(indices, all_eight((1 << low) - 1));
    bits = _mm256_or_si256(bits, _mm256_srl_epi64(bits, _mm_cvtsi32_si128(32 - low)));
    bits = _mm256_blend_epi32(bits, _mm256_setzero_si256(), 0xaa);
    bits = _mm256_or_si256(bits, _mm256_sll_epi64(_mm256_unpackhi_epi64(bits, bits), _mm_cvtsi32_si128(2 * low)));
    const auto first = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_castsi256_si128(bits)));
    const auto second = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_extracti128_si256(bits, 1)));
    const uint64_t out[2] = {first | second << (4 * low), second >> (64 - 4 * low)};
    __builtin_memcpy(to, out, sizeof(out));
}

// Writes whole eights from m > 0 on, which is one's beginning, while they are right, lie close enough together, and fit
// in with what is written too much. Returns where it ended.
int64_t pack_eights(const int32_t* indices, const IndexCode& code, int64_t m, uint32_t* words) {
    auto lower = reinterpret_cast<char*>(words), upper = lower + 4 * code.lower_words;
    const int low = code.low;
    const auto range = static_cast<int32_t>(code.range);
    const int64_t last_byte = 4 * code.upper_words - 8;
    const int64_t most = (4 * code.lower_words - 16) / low * kEight;
    const int64_t end = code.count - kEight < most ? code.count - kEight : most;
    auto place_of = [&](int64_t at) { return (static_cast<uint32_t>(indices[at]) >> low) + static_cast<uint64_t>(at); };
    // Upper bits from byte `begin` on: all before are written, and all that are written.
    auto begin = static_cast<int64_t>(place_of(m - 1) / 8);
    uint64_t pending = static_cast<uint8_t>(upper[begin]);
    lower += m / kEight * low;
    for (; m <= end; m += kEight, lower += low) {
        const __m256i eight = load_eight(indices + m);
        const __m256i falls = _mm256_cmpgt_epi32(load_eight(indices + m - 1), eight);
        if (!_mm256_testz_si256(falls, falls) || indices[m + 7] >= range) break;
        const auto byte = static_cast<int64_t>(place_of(m) / 8);
        if (place_of(m + 7) - static_cast<uint64_t>(8 * byte) >= 64 || byte > last_byte) break;
        __m256i places = _mm256_add_epi32(_mm256_srl_epi32(eight, _mm_cvtsi32_si128(low)), first_eight());
        places = _mm256_sub_epi32(places, all_eight(byte * 8 - m));
        const __m256i one = _mm256_set1_epi64x(1);
        const __m256i bits =
            _mm256_or_si256(_mm256_sllv_epi64(one, _mm256_cvtepu32_epi64(_mm256_castsi256_si128(places))),
                            _mm256_sllv_epi64(one, _mm256_cvtepu32_epi64(_mm256_extracti128_si256(places, 1))));
        pending = byte - begin < 8 ? pending >> (8 * (byte - begin)) : 0;
        pending |= either(bits);
        begin = byte;
        __builtin_memcpy(upper + byte, &pending, sizeof(pending));
        put_lower(eight, low, lower);
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
        __m256i bits = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        bits = _mm256_inserti128_si256(bits, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + second_at_)), 1);
        return _mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(bits, bytes_), shifts_), ones_);
    }

   private:
    int second_at_;  // bytes; a shuffle stays within 16
    __m256i ones_, bytes_, shifts_;
};

// Writes whole eights of indices while their lower bits can be loaded.
class EightsReader {
   public:
    EightsReader(const uint32_t* words, const IndexCode& code, int32_t* indices)
        : words_(reinterpret_cast<const char*>(words)),
          indices_(indices),
          low_(code.low),
          lower_(code.low),
          last_(4 * (code.lower_words + code.upper_words) - lower_.bytes_read()),
          highest_(all_eight((code.range - 1) >> code.low)),
          before_(all_eight(0)),
          wrong_(all_eight(0)) {}

    // The indices from m on, which is an eight's beginning, whose upper bits are at `places`; returns how many.
    int64_t read(const uint32_t* places, int64_t found, int64_t m) {
        const __m128i low = _mm_cvtsi32_si128(low_);
        const __m256i rotate = _mm256_set_epi32(6, 5, 4, 3, 2, 1, 0, 7);
        const LowerBits lower = lower_;  // not read again after every store
        const __m256i highest = highest_;
        __m256i before = before_, wrong = wrong_, number = _mm256_add_epi32(all_eight(m), first_eight());
        const char* from = words_ + m / kEight * low_;
        const int64_t left = words_ + last_ - from, with_bits = left < 0 ? 0 : left / low_ + 1;
        const int64_t eights = with_bits < found / kEight ? with_bits : found / kEight;
        int32_t* to = indices_ + m;
        for (int64_t e = 0; e < eights; ++e, from += low_) {
            const __m256i upper = _mm256_sub_epi32(load_eight(places + e * kEight), number);
            const __m256i index = _mm256_or_si256(_mm256_sll_epi32(upper, low), lower.at(from));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + e * kEight), index);
            const __m256i rotated = _mm256_permutevar8x32_epi32(index, rotate);
            const __m256i falls = _mm256_cmpgt_epi32(_mm256_blend_epi32(rotated, before, 1), index);
            const __m256i far = _mm256_xor_si256(_mm256_max_epu32(upper, highest), highest);
            wrong = _mm256_or_si256(wrong, _mm256_or_si256(falls, far));
            before = rotated;
            number = _mm256_add_epi32(number, all_eight(kEight));
        }
        before_ = before;
        wrong_ = wrong;
        return eights * kEight;
    }
    bool right() const { return _mm256_testz_si256(wrong_, wrong_) != 0; }

   private:
    const char* words_;
    int32_t* indices_;
    const int low_;
    const LowerBits lower_;
    const int64_t last_;  // byte where lower bits may be loaded
    const __m256i highest_;
    __m256i before_, wrong_;
};

// The places of a word's bits. Writes 8 more than there are, at most.
inline int64_t put_places(uint32_t bits, int64_t place, uint32_t* to) {
    int64_t found = 0;
    __m256i base = all_eight(place);
    for (int b = 0; b < 4; ++b) {
        const uint32_t byte = bits >> (8 * b) & 0xffu;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + found), _mm256_add_epi32(base, set_bits_of(byte)));
        base = _mm256_add_epi32(base, all_eight(8));
        found += __builtin_popcount(byte);
    }
    return found;
}

#endif

// One index from the place of its upper bit; false if it is wrong.
inline bool unpack_one(const uint32_t* words, const IndexCode& code, int64_t m, int64_t place, int32_t* indices) {
    const int64_t index = (place - m) << code.low | lower_of(words, code, m);
    if (index < (m == 0 ? 0 : indices[m - 1]) || index >= code.range) return false;
    indices[m] = static_cast<int32_t>(index);
    return true;
}

int64_t bits_in(const uint32_t* words, int64_t count) {
    int64_t sum = 0;
    for (int64_t w = 0; w < count; ++w) sum += __builtin_popcount(words[w]);
    return sum;
}

}  // namespace

int64_t pack_indices(const int32_t* indices, const IndexCode& code, uint32_t* words) {
    __builtin_memset(words + code.lower_words, 0, static_cast<size_t>(code.upper_words) * sizeof(uint32_t));
    int64_t m = 0;
#if defined(PYCOMM_ISA_AVX512) || defined(PYCOMM_ISA_AVX2)
    while (code.low > 0 && code.low <= 15 && m + kEight <= code.count) {
        if (m > 0) m = pack_eights(indices, code, m, words);
        const int64_t end = m + kEight <= code.count ? m + kEight : code.count;
        const int64_t right = pack_one_by_one(indices, code, m, end, words);
        if (right < end) return right;
        m = end;
    }
#endif
    return pack_one_by_one(indices, code, m, code.count, words);
}

bool unpack_indices(const uint32_t* words, const IndexCode& code, int32_t* indices) {
    const uint32_t* const upper = words + code.lower_words;
    if (bits_in(upper, code.upper_words) != code.count) return false;
    int64_t m = 0, w = 0;
#if defined(PYCOMM_ISA_AVX512) || defined(PYCOMM_ISA_AVX2)
    constexpr int64_t kPlaces = 1024;
    uint32_t places[kPlaces + 32 + 2 * kEight];
    EightsReader reader(words, code, indices);
    int64_t found = 0;
    while (code.low > 0 && code.low <= 25 && w < code.upper_words) {
        while (w < code.upper_words && found < kPlaces) {
            found += put_places(upper[w], w * 32, places + found);
            ++w;
        }
        const int64_t used = reader.read(places, found, m);
        if (!reader.right()) return false;
        m += used;
        int64_t left = found - used;
        if (w == code.upper_words || left >= kEight) {
            for (int64_t j = used; j < found; ++j, ++m) {
                if (!unpack_one(words, code, m, places[j], indices)) return false;
            }
            left = 0;
        }
        for (int64_t j = 0; j < left; ++j) places[j] = places[used + j];
        found = left;
    }
    if (m > 0) return indices[m - 1] < code.range;
#endif
    for (; w < code.upper_words; ++w) {
        for (uint32_t bits = upper[w]; bits != 0; bits &= bits - 1, ++m) {
            if (!unpack_one(words, code, m, w * 32 + __builtin_ctz(bits), indices)) return false;
        }
    }
    return true;
}

}  // namespace pycomm::PYCOMM_ISA
