// Random numbers that follow from a seed and a position alone, so that nothing has to be kept and everybody, on any
// device, gets the same ones.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PYCOMM_EVERYWHERE static __host__ __device__ inline
#else
#define PYCOMM_EVERYWHERE static inline
#endif

namespace pycomm {

// Wellons' "lowbias32", but for its first step.
PYCOMM_EVERYWHERE constexpr uint32_t scrambled_rest(uint32_t x) {
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}
PYCOMM_EVERYWHERE constexpr uint32_t scrambled(uint32_t x) { return scrambled_rest(x ^ (x >> 16)); }

struct Seed {
    uint32_t parts[2];
};

PYCOMM_EVERYWHERE Seed mixed(const int64_t* seed) {
    Seed out;
    for (uint32_t j = 0; j < 2; ++j) {
        auto s = static_cast<uint64_t>(seed[j]);
        out.parts[j] = scrambled(static_cast<uint32_t>(s) + 0x9e3779b9u * (j + 1)) ^
                       scrambled(static_cast<uint32_t>(s >> 32) + 0x85ebca6bu);
    }
    return out;
}

// Uniform in [0, 1), 24 bits, for element i.
PYCOMM_EVERYWHERE float uniform(const Seed& seed, int64_t i) {
    uint32_t x = scrambled(static_cast<uint32_t>(i) ^ seed.parts[0]);
    return static_cast<float>(scrambled(x + seed.parts[1]) >> 8) * 0x1p-24f;
}

// Keys of hashes (hashes.h): element i, the j-th one of block n, has the sum of the keys of j and of n.
struct HashKeys {
    uint32_t a, b;
};

inline constexpr int64_t kHashBlock = 1024;  // elements

PYCOMM_EVERYWHERE constexpr HashKeys hash_keys(uint32_t x) {
    uint32_t a = scrambled(x);
    return {a, a * 0x9e3779b1u + 0x85ebca6bu};
}
PYCOMM_EVERYWHERE HashKeys hash_keys_of_block(int64_t n) { return hash_keys(~static_cast<uint32_t>(n)); }

// Term of an element with these bits.
PYCOMM_EVERYWHERE uint64_t hash_term(uint64_t bits, HashKeys block, HashKeys element) {
    return static_cast<uint64_t>(static_cast<uint32_t>(bits) + block.a + element.a) *
           (static_cast<uint32_t>(bits >> 32) + block.b + element.b);
}

// Term of the element with these bits, the i-th one, in the hash of its array.
PYCOMM_EVERYWHERE uint64_t hash_term(uint64_t bits, int64_t i) {
    return hash_term(bits, hash_keys_of_block(i / kHashBlock), hash_keys(static_cast<uint32_t>(i % kHashBlock)));
}

}  // namespace pycomm
