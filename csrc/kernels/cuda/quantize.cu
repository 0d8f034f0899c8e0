#include "kernels/quantize.h"

#include <cmath>

#include "device/launch.h"
#include "kernels/cuda/arrays.h"
#include "kernels/random.h"

namespace pycomm::cuda {
namespace {

constexpr int kCount = 4;          // elements that move in one access
constexpr int64_t kOfWarp = 2048;  // longer blocks of elements are worked on by a whole block of threads

using Floats = Packet<float, kCount>;

struct Quantizing {
    const char* x;
    int64_t count;
    Quantization config;
    const int64_t* seed;
    float* scales;
    char* codes;
    char* remainder;
    bool aligned;  // x, to packets
};

// Elements [at, at + kCount), zeros from `end` on.
PYCOMM_DEVICE Floats load_floats(const char* x, int64_t at, int64_t end) {
    if (at + kCount <= end) return load_packet<float, kCount>(x, at);
    Floats out = {};
    for (int e = 0; at + e < end; ++e) out.values[e] = load_element<float>(x, at + e);
    return out;
}

// Calls use(at, packet) for this thread's share of the packets of elements [begin, end). kWhole: all of them are whole,
// and aligned to their size.
template <bool kWhole, class Use>
PYCOMM_DEVICE void for_floats(const char* x, int64_t begin, int64_t end, Share share, Use&& use) {
    constexpr int kUnroll = 4;
    auto load = [&](int64_t i) {
        int64_t at = begin + i * kCount;
        return kWhole ? reinterpret_cast<const Floats*>(x)[at / kCount] : load_floats(x, at, end);
    };
    for_places<kUnroll>((end - begin + kCount - 1) / kCount, share, load,
                        [&](int64_t i, const Floats& packet) { use(begin + i * kCount, packet); });
}

// Part of a block's norm, and how two parts become one. Magnitudes go by their bits: NaN ranks highest.
struct PartOfNorm {
    Norm norm;
    float sum;
    uint32_t largest;

    PYCOMM_MEMBER void take(float x) {
        if (norm == Norm::kEuclidean) {
            sum += x * x;
            return;
        }
        uint32_t bits = device::bits_of(x) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    PYCOMM_MEMBER void take(const PartOfNorm& other) {
        sum += other.sum;
        largest = other.largest > largest ? other.largest : largest;
    }
    PYCOMM_MEMBER float value() const { return norm == Norm::kEuclidean ? std::sqrt(sum) : device::float_of(largest); }
};

// The norm over all lanes of the warp, or over all threads of the block.
template <bool kBlock>
PYCOMM_DEVICE float norm_of_all(PartOfNorm mine) {
    int lane = device::thread_index() % device::kWarpSize, warp = device::thread_index() / device::kWarpSize;
    for (int distance = 1; distance < device::kWarpSize; distance *= 2) {
        PartOfNorm other{mine.norm, device::shuffle(mine.sum, lane ^ distance),
                         device::shuffle(mine.largest, lane ^ distance)};
        mine.take(other);
    }
    if constexpr (kBlock) {
        PYCOMM_SHARED(PartOfNorm, of_warps, device::kMaxThreads / device::kWarpSize);
        if (lane == 0) of_warps[warp] = mine;
        device::block_barrier();
        PartOfNorm all{mine.norm, 0.0f, 0};
        for (int w = 0; w < device::num_threads() / device::kWarpSize; ++w) all.take(of_warps[w]);
        mine = all;
    }
    return mine.value();
}

// The code of one element, as a number.
struct Encoder {
    float scale, inverse, most;
    bool random;
    Seed seed;

    PYCOMM_MEMBER float code_of(float x, int64_t i) const {
        float level = device::float_of(device::bits_of(x * inverse) & 0x7fffffffu);
        if (random) {
            level = static_cast<float>(static_cast<int>(level + uniform(seed, i)));
        } else {
            level = (level + 0x1.8p23f) - 0x1.8p23f;  // to the nearest whole number, ties to even
        }
        level = level < most ? level : most;
        return device::float_of(device::bits_of(level) | (device::bits_of(x) & 0x80000000u));
    }
};

// Stores the codes of elements [at, at + kCount), from the lowest bit on. Bits beyond `end` are 0.
PYCOMM_DEVICE void store_codes(char* codes, int64_t at, int64_t end, int bits, uint32_t packed) {
    if (at + kCount <= end && bits == 8) return store_element(codes, at / kCount, packed);
    if (at + kCount <= end && bits == 4) return store_element(codes, at / kCount, static_cast<uint16_t>(packed));
    for (int64_t byte = at * bits / 8; byte < (end * bits + 7) / 8 && byte < (at + kCount) * bits / 8; ++byte) {
        codes[byte] = static_cast<char>(packed);
        packed >>= 8;
    }
}

// Elements [begin, end), one block of them; see quantize_kernel.
template <bool kBlock, bool kWhole>
PYCOMM_DEVICE void quantize_block(const Quantizing& job, int64_t number, int64_t begin, int64_t end) {
    const int thread = device::thread_index();
    const Share share =
        kBlock ? Share{thread, device::num_threads()} : Share{thread % device::kWarpSize, device::kWarpSize};
    PartOfNorm mine{job.config.norm, 0.0f, 0};
    for_floats<kWhole>(job.x, begin, end, share, [&](int64_t, const Floats& x) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) mine.take(x.values[e]);
    });
    float scale = norm_of_all<kBlock>(mine) * (1.0f / static_cast<float>(job.config.levels));
    if (scale < kSmallestScale) scale = 0.0f;
    if (share.first == 0) job.scales[number] = scale;
    Encoder encoder{
        scale, scale == 0.0f ? 0.0f : 1.0f / scale, static_cast<float>(job.config.levels), job.seed != nullptr, {}};
    if (encoder.random) encoder.seed = mixed(job.seed);
    // Every thread reads only its own elements again, so the remainder may be x itself.
    for_floats<kWhole>(job.x, begin, end, share, [&](int64_t at, Floats x) {
        uint32_t packed = 0;
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
            float code = encoder.code_of(x.values[e], at + e);
            packed |= (static_cast<uint32_t>(static_cast<int>(code)) & ((1u << job.config.bits) - 1))
                      << e * job.config.bits;
            x.values[e] = x.values[e] - code * scale;
        }
        store_codes(job.codes, at, end, job.config.bits, packed);
        if (job.remainder != nullptr) store_before(end, job.remainder, at, x);
    });
}

// A warp per block of elements, or a block of threads.
template <bool kBlock>
PYCOMM_KERNEL quantize_kernel(Quantizing job) {
    int warp = device::thread_index() / device::kWarpSize, warps = device::num_threads() / device::kWarpSize;
    int64_t number = kBlock ? device::block_index() : static_cast<int64_t>(device::block_index()) * warps + warp;
    int64_t begin = number * job.config.block;
    if (begin >= job.count) return;  // all of them
    int64_t end = begin + job.config.block < job.count ? begin + job.config.block : job.count;
    if (job.aligned && end % kCount == 0) {
        quantize_block<kBlock, true>(job, number, begin, end);
    } else {
        quantize_block<kBlock, false>(job, number, begin, end);
    }
}

// The codes of elements [at, at + kCount), 0 for those beyond `end`.
PYCOMM_DEVICE uint32_t load_codes(const char* codes, int64_t at, int64_t end, int bits) {
    if (at + kCount <= end && bits == 8) return load_element<uint32_t>(codes, at / kCount);
    if (at + kCount <= end && bits == 4) return load_element<uint16_t>(codes, at / kCount);
    uint32_t out = 0;
    int64_t begin = at * bits / 8;
    for (int64_t byte = begin; byte < (end * bits + 7) / 8 && byte < (at + kCount) * bits / 8; ++byte) {
        out |= static_cast<uint32_t>(static_cast<unsigned char>(codes[byte])) << 8 * (byte - begin);
    }
    return out;
}

struct Dequantizing {
    Arrays arrays;  // the contributions' scales, then their codes
    int num_contributions;
    Quantization config;
    char* out;
    int64_t count;
    Scale factor;
    bool aligned;  // all codes, so that those of a packet are read in one access

    PYCOMM_MEMBER const float* scales(int p) const { return reinterpret_cast<const float*>(arrays[p]); }
    PYCOMM_MEMBER const char* codes(int p) const { return arrays[num_contributions + p]; }
    PYCOMM_MEMBER int64_t block_of(int64_t at) const {
        if (count > UINT32_MAX) return at / config.block;
        return static_cast<uint32_t>(at) / static_cast<uint32_t>(config.block);
    }
};

template <int kBits>
using Codes = std::conditional_t<kBits == 8, uint32_t, std::conditional_t<kBits == 4, uint16_t, uint8_t>>;

constexpr int kSums = 2;  // packets of sums that a thread makes at once

template <int kBits>
struct Dequantized {
    int64_t places[kSums];  // of their first elements
    int64_t blocks[kSums];
    Floats sums[kSums];

    // Adds kInputs contributions from number p on. All loads come first, so that they are under way together.
    template <bool kWhole, int kInputs>
    PYCOMM_MEMBER void add(const Dequantizing& job, int p) {
        uint32_t packed[kInputs][kSums];
        float scales[kInputs][kSums];
#pragma unroll
        for (int q = 0; q < kInputs; ++q) {
            const char* codes = job.codes(p + q);
            const float* scales_of_all = job.scales(p + q);
#pragma unroll
            for (int u = 0; u < kSums; ++u) {
                packed[q][u] = kWhole ? reinterpret_cast<const Codes<kBits>*>(codes)[places[u] / kCount]
                                      : load_codes(codes, places[u], job.count, kBits);
                scales[q][u] = scales_of_all[blocks[u]];
            }
        }
#pragma unroll
        for (int q = 0; q < kInputs; ++q) {
#pragma unroll
            for (int u = 0; u < kSums; ++u) {
#pragma unroll
                for (int e = 0; e < kCount; ++e) {
                    // Shifted to the top first, so that shifting down extends its sign.
                    auto code = static_cast<int32_t>(packed[q][u] << (32 - kBits * (e + 1))) >> (32 - kBits);
                    sums[u].values[e] = sums[u].values[e] + static_cast<float>(code) * scales[q][u];
                }
            }
        }
    }
};

template <int kBits, bool kWhole>
PYCOMM_DEVICE void dequantize_packets(const Dequantizing& job, int64_t first, int64_t packets) {
    const Factor factor(job.factor);
    Dequantized<kBits> mine;
#pragma unroll
    for (int u = 0; u < kSums; ++u) {  // past the end the first is computed again
        int64_t packet = first + u * device::num_threads();
        mine.places[u] = kCount * (packet < packets ? packet : first);
        mine.blocks[u] = job.block_of(mine.places[u]);
        mine.sums[u] = {};
    }
    int p = 0;
    if constexpr (kWhole) {
        for (; p + 4 <= job.num_contributions; p += 4) mine.template add<true, 4>(job, p);
    }
    for (; p < job.num_contributions; ++p) mine.template add<kWhole, 1>(job, p);
    store_scaled(job.count, job.out, mine.places, mine.sums, factor.as<float>());
}

template <int kBits>
PYCOMM_KERNEL dequantize_kernel(Dequantizing job) {
    const int64_t packets = (job.count + kCount - 1) / kCount, whole = job.count / kCount;
    const int64_t of_block = int64_t{kSums} * device::num_threads(), begin = device::block_index() * of_block;
    const int64_t first = begin + device::thread_index();
    if (first >= packets) return;
    if (job.aligned && begin + of_block <= whole) {
        dequantize_packets<kBits, true>(job, first, packets);
    } else {
        dequantize_packets<kBits, false>(job, first, packets);
    }
}

}  // namespace

void quantize(const Buffer& x, const Quantization& config, const int64_t* seed, float* scales, uint8_t* codes,
              float* remainder, Stream stream) {
    if (x.count == 0) return;
    Quantizing job{x.bytes(),
                   x.count,
                   config,
                   seed,
                   scales,
                   reinterpret_cast<char*>(codes),
                   reinterpret_cast<char*>(remainder),
                   reinterpret_cast<uintptr_t>(x.data) % sizeof(Floats) == 0};
    int64_t blocks = num_blocks(config, x.count);
    if (config.block > kOfWarp) return device::launch("quantize", quantize_kernel<true>, blocks, stream, job);
    device::launch("quantize", quantize_kernel<false>,
                   blocks_for(blocks, device::threads_per_block() / device::kWarpSize), stream, job);
}

int64_t dequantize_workspace_bytes(std::size_t num_contributions) { return arrays_bytes(2 * num_contributions); }

void dequantize(const std::vector<const float*>& scales, const std::vector<const uint8_t*>& codes,
                const Quantization& config, const Buffer& out, Scale factor, Workspace& workspace, Stream stream) {
    if (out.count == 0) return;
    std::vector<Buffer> arrays;
    bool aligned = true;
    for (const float* p : scales) arrays.push_back({const_cast<float*>(p), num_blocks(config, out.count), DType::kF32});
    for (const uint8_t* p : codes) {
        arrays.push_back({const_cast<uint8_t*>(p), code_bytes(config, out.count), DType::kU8});
        aligned = aligned && reinterpret_cast<uintptr_t>(p) % sizeof(Codes<8>) == 0;
    }
    Dequantizing job{arrays_of(arrays, workspace, stream),
                     static_cast<int>(scales.size()),
                     config,
                     out.bytes(),
                     out.count,
                     factor,
                     aligned};
    int64_t blocks = blocks_for(out.count, device::threads_per_block() * kSums * kCount);
    auto with = [&](auto kernel) { device::launch("dequantize", kernel, blocks, stream, job); };
    if (config.bits == 8) return with(dequantize_kernel<8>);
    if (config.bits == 4) return with(dequantize_kernel<4>);
    with(dequantize_kernel<2>);
}

}  // namespace pycomm::cuda
