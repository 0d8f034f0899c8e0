#include "kernels/quantize.h"

#include <cmath>

#include "device/launch.h"
#include "kernels/cuda/table.h"
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
};

// Elements [at, at + kCount), zeros from `end` on.
PYCOMM_DEVICE Floats load_floats(const char* x, int64_t at, int64_t end) {
    if (at + kCount <= end) return load_packet<float, kCount>(x, at);
    Floats out = {};
    for (int e = 0; at + e < end; ++e) out.values[e] = load_element<float>(x, at + e);
    return out;
}

PYCOMM_DEVICE void store_floats(char* x, int64_t at, int64_t end, const Floats& floats) {
    if (at + kCount <= end) return store_packet<float, kCount>(x, at, floats);
    for (int e = 0; at + e < end; ++e) store_element(x, at + e, floats.values[e]);
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

// The norm of what all lanes of the warp have together; or of all threads of the block.
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

// The code of one element as a number, and by how much it falls short.
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

// The codes of elements [at, at + kCount) from the lowest bit on; what lies behind `end` is 0.
PYCOMM_DEVICE void store_codes(char* codes, int64_t at, int64_t end, int bits, uint32_t packed) {
    if (at + kCount <= end && bits == 8) return store_element(codes, at / kCount, packed);
    if (at + kCount <= end && bits == 4) return store_element(codes, at / kCount, static_cast<uint16_t>(packed));
    for (int64_t byte = at * bits / 8; byte < (end * bits + 7) / 8 && byte < (at + kCount) * bits / 8; ++byte) {
        codes[byte] = static_cast<char>(packed);
        packed >>= 8;
    }
}

// A warp per block of elements, or a block of threads.
template <bool kBlock>
PYCOMM_KERNEL quantize_kernel(Quantizing job) {
    int lane = device::thread_index() % device::kWarpSize, warp = device::thread_index() / device::kWarpSize;
    int warps = device::num_threads() / device::kWarpSize;
    int64_t number = kBlock ? device::block_index() : static_cast<int64_t>(device::block_index()) * warps + warp;
    int64_t begin = number * job.config.block;
    if (begin >= job.count) return;  // all of them
    int64_t end = begin + job.config.block < job.count ? begin + job.config.block : job.count;
    int first = kCount * (kBlock ? device::thread_index() : lane);
    int stride = kCount * (kBlock ? device::num_threads() : device::kWarpSize);
    PartOfNorm mine{job.config.norm, 0.0f, 0};
#pragma unroll 4
    for (int64_t at = begin + first; at < end; at += stride) {
        Floats x = load_floats(job.x, at, end);
        for (int e = 0; e < kCount; ++e) mine.take(x.values[e]);
    }
    float scale = norm_of_all<kBlock>(mine) * (1.0f / static_cast<float>(job.config.levels));
    if (scale < kSmallestScale) scale = 0.0f;
    if (first == 0) job.scales[number] = scale;
    Encoder encoder{
        scale, scale == 0.0f ? 0.0f : 1.0f / scale, static_cast<float>(job.config.levels), job.seed != nullptr, {}};
    if (encoder.random) encoder.seed = mixed(job.seed);
    // Every thread meets its own elements again, and nobody else's: the remainder may lie where x does.
    for (int64_t at = begin + first; at < end; at += stride) {
        Floats x = load_floats(job.x, at, end);
        uint32_t packed = 0;
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
            float code = encoder.code_of(x.values[e], at + e);
            packed |= (static_cast<uint32_t>(static_cast<int>(code)) & ((1u << job.config.bits) - 1))
                      << e * job.config.bits;
            x.values[e] = x.values[e] - code * scale;
        }
        store_codes(job.codes, at, end, job.config.bits, packed);
        if (job.remainder != nullptr) store_floats(job.remainder, at, end, x);
    }
}

// The codes of elements [at, at + kCount), 0 for those behind `end`.
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

// `scales` and `codes`: an entry for each contribution.
PYCOMM_KERNEL dequantize_kernel(const Entry* scales, const Entry* codes, int num_contributions, Quantization config,
                                char* out, int64_t count, Scale factor) {
    auto thread = static_cast<int64_t>(device::block_index()) * device::num_threads() + device::thread_index();
    int64_t at = thread * kCount;
    if (at >= count) return;
    int64_t block = at / config.block;
    Floats sum = {};
#pragma unroll 4
    for (int p = 0; p < num_contributions; ++p) {
        float scale = reinterpret_cast<const float*>(scales[p].data)[block];
        uint32_t packed = load_codes(codes[p].data, at, count, config.bits);
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
            // Moved to the top, so that its sign comes down with it.
            auto code = static_cast<int32_t>(packed << (32 - config.bits * (e + 1))) >> (32 - config.bits);
            sum.values[e] = sum.values[e] + static_cast<float>(code) * scale;
        }
    }
    auto by = factor_of<float>(factor);
#pragma unroll
    for (int e = 0; e < kCount; ++e) sum.values[e] = sum.values[e] * by;
    store_floats(out, at, count, sum);
}

}  // namespace

void quantize(const Buffer& x, const Quantization& config, const int64_t* seed, float* scales, uint8_t* codes,
              float* remainder, Stream stream) {
    if (x.count == 0) return;
    Quantizing job{
        x.bytes(), x.count, config, seed, scales, reinterpret_cast<char*>(codes), reinterpret_cast<char*>(remainder)};
    int64_t blocks = num_blocks(config, x.count);
    if (config.block > kOfWarp) return device::launch("quantize", quantize_kernel<true>, blocks, stream, job);
    device::launch("quantize", quantize_kernel<false>,
                   blocks_for(blocks, device::threads_per_block() / device::kWarpSize), stream, job);
}

int64_t dequantize_workspace_bytes(std::size_t num_contributions) { return table_bytes(2 * num_contributions); }

void dequantize(const std::vector<const float*>& scales, const std::vector<const uint8_t*>& codes,
                const Quantization& config, const Buffer& out, Scale factor, Workspace& workspace, Stream stream) {
    if (out.count == 0) return;
    std::vector<Buffer> arrays;
    for (const float* p : scales) arrays.push_back({const_cast<float*>(p), num_blocks(config, out.count), DType::kF32});
    for (const uint8_t* p : codes)
        arrays.push_back({const_cast<uint8_t*>(p), code_bytes(config, out.count), DType::kU8});
    const Entry* entries = upload(arrays, workspace, stream).entries;
    const auto num_contributions = static_cast<int>(scales.size());
    device::launch("dequantize", dequantize_kernel, blocks_for(out.count, device::threads_per_block() * kCount), stream,
                   entries, entries + num_contributions, num_contributions, config, out.bytes(), out.count, factor);
}

}  // namespace pycomm::cuda
