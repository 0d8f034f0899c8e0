#include "kernels/signs.h"

#include "device/launch.h"
#include "kernels/cuda/arrays.h"
#include "kernels/cuda/bits.h"

namespace pycomm::cuda {
namespace {

constexpr int kCount = 4;  // elements that move in one access

using Floats = Packet<float, kCount>;

struct Signing {
    const char* x;
    int64_t count;
    const float* magnitude;
    uint32_t* words;
    char* remainder;
    bool aligned;  // x, to packets
};

// The signs of elements from `at` on, the first one's in bit 0. Writes what is left of them.
template <int kElems>
PYCOMM_DEVICE uint32_t signs_of(const Signing& job, int64_t at, const Packet<float, kElems>& x, uint32_t magnitude) {
    Packet<float, kElems> left;
    uint32_t signs = 0;
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
        uint32_t sign = device::bits_of(x.values[e]) & 0x80000000u;
        signs |= sign >> (31 - e);
        left.values[e] = x.values[e] - device::float_of(magnitude | sign);
    }
    if (job.remainder != nullptr) store_packet<float, kElems>(job.remainder, at, left);
    return signs;
}

// The same for any alignment, and for elements beyond the end of x.
PYCOMM_DEVICE uint32_t signs_of_some(const Signing& job, int64_t at, uint32_t magnitude) {
    Packet<float, 1> x[kCount] = {};
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
        if (at + e < job.count) x[e] = load_packet<float, 1>(job.x, at + e);
    }
    uint32_t signs = 0;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
        if (at + e < job.count) signs |= signs_of<1>(job, at + e, x[e], magnitude) << e;
    }
    return signs;
}

// A warp takes a chunk of whole words, four packets per lane.
PYCOMM_KERNEL pack_signs_kernel(Signing job) {
    int warp = device::thread_index() / device::kWarpSize, warps = device::num_threads() / device::kWarpSize;
    int64_t chunk = static_cast<int64_t>(device::block_index()) * warps + warp;
    int64_t begin = chunk * kChunkElems;
    if (begin >= job.count) return;  // the whole warp
    int64_t first = begin + device::thread_index() % device::kWarpSize * kCount;
    uint32_t magnitude = device::bits_of(*job.magnitude) & 0x7fffffffu;
    uint32_t signs[kRows] = {};
    if (job.aligned && begin + kChunkElems <= job.count) {
        auto from = reinterpret_cast<const Floats*>(job.x) + first / kCount;
        Floats x[kRows];  // all loads first, so that they are under way together
#pragma unroll
        for (int r = 0; r < kRows; ++r) x[r] = from[r * device::kWarpSize];
#pragma unroll
        for (int r = 0; r < kRows; ++r) signs[r] = signs_of<kCount>(job, first + r * kRowElems, x[r], magnitude);
    } else {
#pragma unroll
        for (int r = 0; r < kRows; ++r) signs[r] = signs_of_some(job, first + r * kRowElems, magnitude);
    }
    write_words(signs, job.words + chunk * kChunkWords, (job.count - begin + 31) / 32);
}

struct Unpacking {
    Arrays arrays;  // the contributions' words, then their magnitudes
    int num_contributions;
    char* out;
    int64_t count;
    Scale factor;
};

constexpr int kSums = 2;  // packets of sums that a thread makes at once

struct Unpacked {
    int64_t places[kSums];  // of their first elements
    Floats sums[kSums];

    // Adds kInputs contributions from number p on. All loads come first, so that they are under way together.
    template <int kInputs>
    PYCOMM_MEMBER void add(const Unpacking& job, int p) {
        uint32_t signs[kInputs][kSums], magnitudes[kInputs];
#pragma unroll
        for (int q = 0; q < kInputs; ++q) {
            auto words = reinterpret_cast<const uint32_t*>(job.arrays[p + q]);
            magnitudes[q] = *reinterpret_cast<const uint32_t*>(job.arrays[job.num_contributions + p + q]);
#pragma unroll
            for (int u = 0; u < kSums; ++u) signs[q][u] = words[places[u] / 32];
        }
#pragma unroll
        for (int q = 0; q < kInputs; ++q) {
#pragma unroll
            for (int u = 0; u < kSums; ++u) {
#pragma unroll
                for (int e = 0; e < kCount; ++e) {
                    uint32_t sign = signs[q][u] >> (places[u] % 32 + e) << 31;
                    sums[u].values[e] = sums[u].values[e] + device::float_of(magnitudes[q] ^ sign);
                }
            }
        }
    }
};

PYCOMM_KERNEL unpack_signs_kernel(Unpacking job) {
    auto begin = int64_t{kSums} * device::block_index() * device::num_threads();
    int64_t first = kCount * (begin + device::thread_index());
    if (first >= job.count) return;
    const Factor factor(job.factor);
    Unpacked mine;
#pragma unroll
    for (int u = 0; u < kSums; ++u) {  // past the end the first is computed again
        int64_t place = first + u * kCount * device::num_threads();
        mine.places[u] = place < job.count ? place : first;
        mine.sums[u] = {};
    }
    int p = 0;
    for (; p + 4 <= job.num_contributions; p += 4) mine.add<4>(job, p);
    for (; p < job.num_contributions; ++p) mine.add<1>(job, p);
    store_scaled(job.count, job.out, mine.places, mine.sums, factor.as<float>());
}

}  // namespace

void pack_signs(const Buffer& x, const float* magnitude, uint32_t* words, float* remainder, Stream stream) {
    if (x.count == 0) return;
    Signing job{x.bytes(),
                x.count,
                magnitude,
                words,
                reinterpret_cast<char*>(remainder),
                reinterpret_cast<uintptr_t>(x.data) % sizeof(Floats) == 0};
    int64_t per_block = device::threads_per_block() / device::kWarpSize * int64_t{kChunkElems};
    device::launch<pack_signs_kernel>("pack_signs", blocks_for(x.count, per_block), stream, job);
}

int64_t unpack_signs_workspace_bytes(std::size_t num_contributions) { return arrays_bytes(2 * num_contributions); }

void unpack_signs(const std::vector<const uint32_t*>& words, const std::vector<const float*>& magnitudes,
                  const Buffer& out, Scale factor, Workspace& workspace, Stream stream) {
    if (out.count == 0) return;
    std::vector<Buffer> arrays;
    for (const uint32_t* p : words) arrays.push_back({const_cast<uint32_t*>(p), (out.count + 31) / 32, DType::kI32});
    for (const float* p : magnitudes) arrays.push_back({const_cast<float*>(p), 1, DType::kF32});
    Unpacking job{arrays_of(arrays, workspace, stream), static_cast<int>(words.size()), out.bytes(), out.count, factor};
    device::launch<unpack_signs_kernel>(
        "unpack_signs", blocks_for(out.count, device::threads_per_block() * kSums * kCount), stream, job);
}

}  // namespace pycomm::cuda
