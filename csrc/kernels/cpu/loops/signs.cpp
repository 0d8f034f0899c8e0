#include "kernels/cpu/loops/members.h"
#include "kernels/cpu/loops/simd.h"

namespace pycomm::PYCOMM_ISA {
namespace {

constexpr int kWord = 32;

inline uint32_t pack_word(const float* x, float* remainder, Vec magnitude_of_all) {
    uint32_t bits = 0;
    for (int u = 0; u < kWord / kLanes; ++u) {
        Vec v = load(x + u * kLanes);
        bits |= sign_bits(v) << (u * kLanes);
        if (remainder != nullptr) store(remainder + u * kLanes, sub(v, with_sign(magnitude_of_all, v)));
    }
    return bits;
}

template <bool kStreaming>
inline void unpack_word(const uint32_t* const* words, const float* magnitudes, int num_contributions, int64_t word,
                        Vec factor, float* out) {
    constexpr int kVecsOfWord = kWord / kLanes;
    Vec sums[kVecsOfWord];
    for (Vec& sum : sums) sum = splat(0.0f);
    for (int p = 0; p < num_contributions; ++p) {
        const Vec magnitude = splat(magnitudes[p]);
        const uint32_t bits = words[p][word];
        for (int u = 0; u < kVecsOfWord; ++u) sums[u] = add(sums[u], negated_where(magnitude, bits, u));
    }
    for (int u = 0; u < kVecsOfWord; ++u) {
        const Vec sum = mul(sums[u], factor);
        kStreaming ? stream(out + u * kLanes, sum) : store(out + u * kLanes, sum);
    }
}

}  // namespace

void pack_signs(const float* x, int64_t count, float magnitude, uint32_t* words, float* remainder) {
    const Vec all = splat(magnitude);
    auto pack = [&](int, int64_t word) {
        words[word] = pack_word(x + word * kWord, remainder == nullptr ? nullptr : remainder + word * kWord, all);
    };
    int64_t word = in_turn(count / kWord, kStretch / kWord, pack);
    for (; word < count / kWord; ++word) pack(0, word);
    const int64_t i = word * kWord;
    if (i == count) return;
    const auto bytes = static_cast<size_t>(count - i) * sizeof(float);
    float from[kWord] = {}, left[kWord];
    __builtin_memcpy(from, x + i, bytes);
    words[word] = pack_word(from, left, all);
    if (remainder != nullptr) __builtin_memcpy(remainder + i, left, bytes);
}

void unpack_signs(const uint32_t* const* words, const float* magnitudes, int num_contributions, float* out,
                  int64_t count, float factor, Store mode) {
    const Vec by = splat(factor);
    int64_t word = 0;
    if (mode == Store::kStreaming && is_aligned(out, 64)) {
        for (; word < count / kWord; ++word) {
            unpack_word<true>(words, magnitudes, num_contributions, word, by, out + word * kWord);
        }
        fence_streams();
    }
    for (; word < count / kWord; ++word) {
        unpack_word<false>(words, magnitudes, num_contributions, word, by, out + word * kWord);
    }
    const int64_t i = word * kWord;
    if (i == count) return;
    float all[kWord];
    unpack_word<false>(words, magnitudes, num_contributions, word, by, all);
    __builtin_memcpy(out + i, all, static_cast<size_t>(count - i) * sizeof(float));
}

}  // namespace pycomm::PYCOMM_ISA
