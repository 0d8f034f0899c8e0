#include "kernels/cpu/loops/members.h"
#include "kernels/cpu/loops/simd.h"

namespace pycomm::PYCOMM_ISA {
namespace {

constexpr int kWord = 32;

// Calls whole(i) for every 32 elements, and rest(i, n) for the n that remain.
template <class Whole, class Rest>
inline void for_words(int64_t count, Whole&& whole, Rest&& rest) {
    int64_t i = 0;
    for (; i + kWord <= count; i += kWord) whole(i);
    if (i < count) rest(i, count - i);
}

inline uint32_t pack_word(const float* x, float* remainder, Vec magnitude_of_all) {
    uint32_t bits = 0;
    for (int u = 0; u < kWord / kLanes; ++u) {
        Vec v = load(x + u * kLanes);
        bits |= sign_bits(v) << (u * kLanes);
        if (remainder != nullptr) store(remainder + u * kLanes, sub(v, with_sign(magnitude_of_all, v)));
    }
    return bits;
}

inline void unpack_word(const uint32_t* const* words, const float* magnitudes, int num_contributions, int64_t word,
                        Vec factor, float* out) {
    for (int u = 0; u < kWord / kLanes; ++u) {
        Vec sum = splat(0.0f);
        for (int p = 0; p < num_contributions; ++p) {
            uint32_t bits = words[p][word] >> (u * kLanes);
            sum = add(sum, negated_where(splat(magnitudes[p]), bits));
        }
        store(out + u * kLanes, mul(sum, factor));
    }
}

}  // namespace

void pack_signs(const float* x, int64_t count, float magnitude, uint32_t* words, float* remainder) {
    const Vec all = splat(magnitude);
    for_words(
        count,
        [&](int64_t i) { words[i / kWord] = pack_word(x + i, remainder == nullptr ? nullptr : remainder + i, all); },
        [&](int64_t i, int64_t n) {
            float from[kWord] = {}, left[kWord];
            __builtin_memcpy(from, x + i, static_cast<size_t>(n) * sizeof(float));
            words[i / kWord] = pack_word(from, left, all);
            if (remainder != nullptr) __builtin_memcpy(remainder + i, left, static_cast<size_t>(n) * sizeof(float));
        });
}

void unpack_signs(const uint32_t* const* words, const float* magnitudes, int num_contributions, float* out,
                  int64_t count, float factor) {
    const Vec by = splat(factor);
    for_words(
        count, [&](int64_t i) { unpack_word(words, magnitudes, num_contributions, i / kWord, by, out + i); },
        [&](int64_t i, int64_t n) {
            float all[kWord];
            unpack_word(words, magnitudes, num_contributions, i / kWord, by, all);
            __builtin_memcpy(out + i, all, static_cast<size_t>(n) * sizeof(float));
        });
}

}  // namespace pycomm::PYCOMM_ISA
