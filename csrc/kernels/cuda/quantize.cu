#include "kernels/quantize.h"

#include <cmath>

#include "device/launch.h"
#include "kernels/cuda/arrays.h"
#include "kernels/fp8.h"
#include "kernels/random.h"

namespace pycomm::cuda {
namespace {

constexpr int kVectorWidth = 4;    // elements that move in one access
constexpr int64_t kOfWarp = 2048;  // longer blocks of elements are worked on by a whole block of threads

using Floats = Packet<float, kVectorWidth>;

struct Quantizing {
    const char* x;
    int64_t count;
    Quantization config;
    const int64_t* seed;
    float* scales;
    char* codes;
    char* remainder;
    bool aligned;  // all elements and codes, to packets
};

// Elements [at, at + kVectorWidth), zeros from `end` on. kWhole: none are, and x is aligned to packets.
template <bool kWhole>
PYCOMM_DEVICE Floats load_floats(const char* x, int64_t at, int64_t end) {
    if (kWhole) return *reinterpret_cast<const Floats*>(x + at * static_cast<int64_t>(sizeof(float)));
    Floats out = {};
#pragma unroll
    for (int e = 0; e < kVectorWidth; ++e) {
        if (at + e < end) out.values[e] = load_element<float>(x, at + e);
    }
    return out;
}

// Stores those before `end`.
template <bool kWhole>
PYCOMM_DEVICE void store_floats(char* x, int64_t at, int64_t end, const Floats& packet) {
    if (!kWhole) return store_before(end, x, at, packet);
    *reinterpret_cast<Floats*>(x + at * static_cast<int64_t>(sizeof(float))) = packet;
}

// Calls use(at, packet) for this thread's share of the packets of elements [begin, end).
template <bool kWhole, class Use>
PYCOMM_DEVICE void for_floats(const char* x, int64_t begin, int64_t end, Share share, Use&& use) {
    constexpr int kUnroll = kWhole ? 4 : 1;
    for_places<kUnroll>((end - begin + kVectorWidth - 1) / kVectorWidth, share,
                        [&](int64_t i) { return load_floats<kWhole>(x, begin + i * kVectorWidth, end); },
                        [&](int64_t i, const Floats& packet) { use(begin + i * kVectorWidth, packet); });
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

// Formats of codes: a packet's codes as one word, and the number that each code stands for.
template <int kSize, CodeType kElement = CodeType::kInt>
struct CodesOf {
    static constexpr int kBits = kSize;
    static constexpr CodeType kType = kElement;
    using Word = std::conditional_t<kBits == 8, uint32_t, std::conditional_t<kBits == 4, uint16_t, uint8_t>>;

    PYCOMM_MEMBER static int64_t byte_of(int64_t at) {
        return static_cast<int64_t>(static_cast<uint64_t>(at) * kBits / 8);
    }

    PYCOMM_MEMBER static float value(uint32_t packed, int e) {
        // Shifted to the top first, so that shifting down extends its sign.
        return static_cast<float>(static_cast<int32_t>(packed << (32 - kBits * (e + 1))) >> (32 - kBits));
    }
};
struct Int8 : CodesOf<8> {};
struct Int4 : CodesOf<4> {};
struct Int2 : CodesOf<2> {};
// An E5M2 is the upper half of a float16, an E4M3 2^8 times one with the same mantissa and exponent.
struct E5M2 : CodesOf<8, CodeType::kE5M2> {
    PYCOMM_MEMBER static float value(uint32_t packed, int e) {
        return widen(F16{static_cast<uint16_t>(packed >> 8 * e << 8)});
    }
};
struct E4M3 : CodesOf<8, CodeType::kE4M3> {
    PYCOMM_MEMBER static float value(uint32_t packed, int e) {
        const uint32_t code = packed >> 8 * e & 0xffu, magnitude = code & 0x7fu;
        const uint32_t half = magnitude == 0x7fu ? 0x7fffu : (code & 0x80u) << 8 | magnitude << 7;
        return widen(F16{static_cast<uint16_t>(half)}) * 256.0f;
    }
};

// Calls use(format).
template <class Use>
void with_format(const Quantization& config, Use&& use) {
    if (config.element == CodeType::kE4M3) return use(E4M3{});
    if (config.element == CodeType::kE5M2) return use(E5M2{});
    if (config.bits == 8) return use(Int8{});
    if (config.bits == 4) return use(Int4{});
    use(Int2{});
}

// The code of one element, and the number that it stands for, in units of the scale.
struct Coded {
    uint32_t code;
    float value;
};

template <class Format>
struct Encoder {
    static constexpr bool kFloat = Format::kType != CodeType::kInt;

    float scale, inverse, most;
    bool random;
    Seed seed;

    PYCOMM_MEMBER Encoder(const Quantizing& job, float norm) : random(job.seed != nullptr), seed{} {
        if constexpr (kFloat) {
            constexpr Fp8 format = fp8_of(Format::kType);
            scale = device::float_of(fp8_scale(device::bits_of(norm), format.most));
            most = format.largest;
        } else {
            most = static_cast<float>(job.config.levels);
            scale = norm * (1.0f / most);
            if (scale < kSmallestScale) scale = 0.0f;
        }
        inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
        if (random) seed = mixed(job.seed);
    }

    PYCOMM_MEMBER Coded code_of(float x, int64_t i) const {
        const uint32_t sign = device::bits_of(x) & 0x80000000u;
        const float level = device::float_of(device::bits_of(x * inverse) & 0x7fffffffu);
        Coded out = kFloat ? fp8_of_level(level, i) : whole_of_level(level, i);
        out.value = device::float_of(device::bits_of(out.value) | sign);
        if constexpr (kFloat) {
            out.code |= sign >> 24;
        } else {
            out.code = static_cast<uint32_t>(static_cast<int>(out.value)) & ((1u << Format::kBits) - 1);
        }
        return out;
    }

    // The code is made of the value, once that has its sign.
    PYCOMM_MEMBER Coded whole_of_level(float level, int64_t i) const {
        if (random) {
            level = static_cast<float>(static_cast<int>(level + uniform(seed, i)));
        } else {
            level = (level + 0x1.8p23f) - 0x1.8p23f;  // to the nearest whole number, ties to even
        }
        return {0, level < most ? level : most};
    }

    // A magnitude is a whole number of units of its mantissa's last bit: of those that its own exponent has, or the
    // smallest normal number's. Rounding may make it the next power of two, which this number and exponent stand for
    // too.
    PYCOMM_MEMBER Coded fp8_of_level(float level, int64_t i) const {
        constexpr Fp8 format = fp8_of(Format::kType);
        constexpr uint32_t least = 127 + format.least, mantissa = format.mantissa;
        const uint32_t own = device::bits_of(level) >> 23, exponent = own > least ? own : least;
        const uint32_t binades = (exponent - least) << mantissa;
        if (random) {
            const float per_level = device::float_of((254 + mantissa - exponent) << 23), top = most * per_level;
            auto units = static_cast<float>(static_cast<int>(level * per_level + uniform(seed, i)));
            units = units < top ? units : top;  // random numbers may round to 1
            return {binades + static_cast<uint32_t>(units), units * device::float_of((exponent - mantissa) << 23)};
        }
        const float magic = device::float_of((exponent + 23 - mantissa) << 23), sum = level + magic;  // in units
        return {binades + (device::bits_of(sum) - device::bits_of(magic)), sum - magic};
    }
};

// Stores the codes of elements [at, at + kVectorWidth), from the lowest bit on. Bits beyond `end` are 0.
template <class Format, bool kWhole>
PYCOMM_DEVICE void store_codes(char* codes, int64_t at, int64_t end, uint32_t packed) {
    using Word = typename Format::Word;
    constexpr int kBits = Format::kBits;
    int64_t byte = Format::byte_of(at);
    if constexpr (kWhole) {
        *reinterpret_cast<Word*>(codes + byte) = static_cast<Word>(packed);
    } else {
        for (; byte < (end * kBits + 7) / 8 && byte < Format::byte_of(at + kVectorWidth); ++byte) {
            codes[byte] = static_cast<char>(packed);
            packed >>= 8;
        }
    }
}

// Threads of a warp, or of a block of threads.
template <bool kBlock>
PYCOMM_DEVICE Share share_of() {
    const int thread = device::thread_index();
    return kBlock ? Share{thread, device::num_threads()} : Share{thread % device::kWarpSize, device::kWarpSize};
}

// Block `number` of elements, those before `end`. elements.for_each(use) calls use(at, packet) for this thread's share
// of them, and elements.replace(encode) the same with encode(at, packet), which makes of a packet what rounding leaves
// over.
template <class Format, bool kBlock, bool kWhole, class Elements>
PYCOMM_DEVICE void quantize_block(const Quantizing& job, int64_t number, int64_t end, Elements&& elements) {
    PartOfNorm mine{Encoder<Format>::kFloat ? Norm::kMax : job.config.norm, 0.0f, 0};
    elements.for_each([&](int64_t, const Floats& x) {
#pragma unroll
        for (int e = 0; e < kVectorWidth; ++e) mine.take(x.values[e]);
    });
    const Encoder<Format> encoder(job, norm_of_all<kBlock>(mine));
    if (share_of<kBlock>().first == 0) job.scales[number] = encoder.scale;
    elements.replace([&](int64_t at, Floats& x) {
        uint32_t packed = 0;
#pragma unroll
        for (int e = 0; e < kVectorWidth; ++e) {
            Coded coded = encoder.code_of(x.values[e], at + e);
            packed |= coded.code << e * Format::kBits;
            x.values[e] = x.values[e] - coded.value * encoder.scale;
        }
        store_codes<Format, kWhole>(job.codes, at, end, packed);
    });
}

// The block of elements that this warp, or block of threads, works on. False: there is none for it.
template <bool kBlock>
PYCOMM_DEVICE bool find_block(const Quantizing& job, int64_t& number, int64_t& begin, int64_t& end) {
    int warp = device::thread_index() / device::kWarpSize, warps = device::num_threads() / device::kWarpSize;
    number = kBlock ? device::block_index() : static_cast<int64_t>(device::block_index()) * warps + warp;
    begin = number * job.config.block;
    end = begin + job.config.block < job.count ? begin + job.config.block : job.count;
    return begin < job.count;
}

// Elements [begin, end) of an array. Every thread reads only its own again, so the remainder may be the array itself.
template <bool kWhole>
struct ArrayOfBlock {
    const Quantizing& job;
    int64_t begin, end;
    Share share;

    template <class Use>
    PYCOMM_MEMBER void for_each(Use&& use) const {
        for_floats<kWhole>(job.x, begin, end, share, use);
    }
    template <class Encode>
    PYCOMM_MEMBER void replace(Encode&& encode) const {
        for_each([&](int64_t at, Floats x) {
            encode(at, x);
            if (job.remainder != nullptr) store_floats<kWhole>(job.remainder, at, end, x);
        });
    }
};

// A warp per block of elements, or a block of threads.
template <class Format, bool kBlock>
PYCOMM_KERNEL_OF(kBlock ? 5 : 4)
quantize_kernel(Quantizing job) {
    int64_t number, begin, end;
    if (!find_block<kBlock>(job, number, begin, end)) return;  // all of them
    const Share share = share_of<kBlock>();
    if (job.aligned && end % kVectorWidth == 0) {
        quantize_block<Format, kBlock, true>(job, number, end, ArrayOfBlock<true>{job, begin, end, share});
    } else {
        quantize_block<Format, kBlock, false>(job, number, end, ArrayOfBlock<false>{job, begin, end, share});
    }
}

// The codes of elements [at, at + kVectorWidth), 0 for those beyond `end`.
template <class Format, bool kWhole>
PYCOMM_DEVICE uint32_t load_codes(const char* codes, int64_t at, int64_t end) {
    int64_t begin = Format::byte_of(at);
    if (kWhole) return *reinterpret_cast<const typename Format::Word*>(codes + begin);
    uint32_t out = 0;
    for (int64_t byte = begin; byte < (end * Format::kBits + 7) / 8 && byte < Format::byte_of(at + kVectorWidth);
         ++byte) {
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
    bool aligned;  // all codes, so that a packet's codes are read in one access

    PYCOMM_MEMBER const float* scales(int p) const { return reinterpret_cast<const float*>(arrays[p]); }
    PYCOMM_MEMBER const char* codes(int p) const { return arrays[num_contributions + p]; }
    PYCOMM_MEMBER int64_t block_of(int64_t at) const {
        if (count > UINT32_MAX) return at / config.block;
        return static_cast<uint32_t>(at) / static_cast<uint32_t>(config.block);
    }
};

constexpr int kSums = 2;  // packets of sums that a thread makes at once

template <class Format>
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
                packed[q][u] = load_codes<Format, kWhole>(codes, places[u], job.count);
                scales[q][u] = scales_of_all[blocks[u]];
            }
        }
#pragma unroll
        for (int q = 0; q < kInputs; ++q) {
#pragma unroll
            for (int u = 0; u < kSums; ++u) {
#pragma unroll
                for (int e = 0; e < kVectorWidth; ++e) {
                    sums[u].values[e] = sums[u].values[e] + Format::value(packed[q][u], e) * scales[q][u];
                }
            }
        }
    }

    template <bool kWhole>
    PYCOMM_MEMBER void add_all(const Dequantizing& job) {
#pragma unroll
        for (int u = 0; u < kSums; ++u) sums[u] = {};
        int p = 0;
        if constexpr (kWhole) {
            for (; p + 4 <= job.num_contributions; p += 4) add<true, 4>(job, p);
        }
        for (; p < job.num_contributions; ++p) add<kWhole, 1>(job, p);
    }
};

template <class Format, bool kWhole>
PYCOMM_DEVICE void dequantize_packets(const Dequantizing& job, int64_t first, int64_t packets) {
    const Factor factor(job.factor);
    Dequantized<Format> mine;
#pragma unroll
    for (int u = 0; u < kSums; ++u) {  // past the end the first is computed again
        int64_t packet = first + u * device::num_threads();
        mine.places[u] = kVectorWidth * (packet < packets ? packet : first);
        mine.blocks[u] = job.block_of(mine.places[u]);
    }
    mine.template add_all<kWhole>(job);
    store_scaled(job.count, job.out, mine.places, mine.sums, factor.as<float>());
}

template <class Format>
PYCOMM_KERNEL dequantize_kernel(Dequantizing job) {
    const int64_t packets = (job.count + kVectorWidth - 1) / kVectorWidth, whole = job.count / kVectorWidth;
    const int64_t of_block = int64_t{kSums} * device::num_threads(), begin = device::block_index() * of_block;
    const int64_t first = begin + device::thread_index();
    if (first >= packets) return;
    if (job.aligned && begin + of_block <= whole) {
        dequantize_packets<Format, true>(job, first, packets);
    } else {
        dequantize_packets<Format, false>(job, first, packets);
    }
}

struct Requantizing {
    Dequantizing from;
    Quantizing to;
};

// Sums for elements [begin, end), block `number`. kOnce: each thread makes them in one step and keeps them, and has its
// packets of the remainder under way together with the contributions.
template <class Format, bool kBlock, bool kOnce, bool kWhole>
struct SumsOfBlock {
    using Index = std::conditional_t<kBlock, int64_t, int>;  // of its packets

    const Requantizing& job;
    int64_t number, begin, end;
    Share share;
    Dequantized<Format> mine;
    Floats before[kSums];

    // Calls load() and then use(u), for the packets of each step.
    template <class Load, class Use>
    PYCOMM_MEMBER void for_steps(Load&& load, Use&& use) {
        const auto packets = static_cast<Index>((end - begin + kVectorWidth - 1) / kVectorWidth);
        for (Index i = share.first; i < packets; i += kSums * share.stride) {
#pragma unroll
            for (int u = 0; u < kSums; ++u) {  // past the end the first is computed again
                Index packet = i + u * share.stride;
                mine.places[u] = begin + kVectorWidth * (packet < packets ? packet : i);
                mine.blocks[u] = number;
            }
            load();
#pragma unroll
            for (int u = 0; u < kSums; ++u) {
                if (i + u * share.stride < packets) use(u);
            }
            if (kOnce) return;
        }
    }
    PYCOMM_MEMBER void load_before() {
        if constexpr (kWhole) {
            if (job.to.remainder == nullptr) return;
#pragma unroll
            for (int u = 0; u < kSums; ++u) {
                before[u] = load_floats<true>(job.to.remainder, mine.places[u], end);
            }
        }
    }
    // Adds what is left of packet u to the remainder.
    PYCOMM_MEMBER void add_left(int u) {
        if constexpr (kWhole) {
#pragma unroll
            for (int e = 0; e < kVectorWidth; ++e) before[u].values[e] = before[u].values[e] + mine.sums[u].values[e];
            store_floats<kWhole>(job.to.remainder, mine.places[u], end, before[u]);
        } else {
#pragma unroll
            for (int e = 0; e < kVectorWidth; ++e) {
                int64_t at = mine.places[u] + e;
                if (at >= end) return;
                store_element(job.to.remainder, at, load_element<float>(job.to.remainder, at) + mine.sums[u].values[e]);
            }
        }
    }
    template <class Use>
    PYCOMM_MEMBER void for_each(Use&& use) {
        auto load = [&] {
            if (kOnce) load_before();
            mine.template add_all<kWhole>(job.from);
        };
        for_steps(load, [&](int u) { use(mine.places[u], mine.sums[u]); });
    }
    template <class Encode>
    PYCOMM_MEMBER void replace(Encode&& encode) {
        auto load = [&] {
            if (kOnce) return;
            mine.template add_all<kWhole>(job.from);
            load_before();  // registers are too few for both at once
        };
        for_steps(load, [&](int u) {
            encode(mine.places[u], mine.sums[u]);
            if (job.to.remainder != nullptr) add_left(u);
        });
    }
};

// As quantize_kernel, of sums. kOnce: a warp's lanes compute the sums of a block in one step.
template <class Format, bool kBlock, bool kOnce>
PYCOMM_KERNEL_OF(4)
requantize_kernel(Requantizing job) {
    int64_t number, begin, end;
    if (!find_block<kBlock>(job.to, number, begin, end)) return;  // all of them
    const Share share = share_of<kBlock>();
    if (job.to.aligned && end % kVectorWidth == 0) {
        SumsOfBlock<Format, kBlock, kOnce, true> sums{job, number, begin, end, share, {}, {}};
        quantize_block<Format, kBlock, true>(job.to, number, end, sums);
    } else {
        SumsOfBlock<Format, kBlock, kOnce, false> sums{job, number, begin, end, share, {}, {}};
        quantize_block<Format, kBlock, false>(job.to, number, end, sums);
    }
}

// Whether a packet's codes, and its elements in each of `floats`, are in one place to load or store.
template <class... Floating>
bool aligned(const uint8_t* codes, const Floating*... floats) {
    uintptr_t all = (uintptr_t{0} | ... | reinterpret_cast<uintptr_t>(floats));
    return reinterpret_cast<uintptr_t>(codes) % sizeof(Int8::Word) == 0 && all % sizeof(Floats) == 0;
}

// Contributions of `count` elements each.
Dequantizing dequantizing(const std::vector<const float*>& scales, const std::vector<const uint8_t*>& codes,
                          const Quantization& config, int64_t count, Workspace& workspace, Stream stream) {
    std::vector<Buffer> arrays;
    bool all_aligned = true;
    for (const float* p : scales) arrays.push_back({const_cast<float*>(p), num_blocks(config, count), DType::kF32});
    for (const uint8_t* p : codes) {
        arrays.push_back({const_cast<uint8_t*>(p), code_bytes(config, count), DType::kU8});
        all_aligned = all_aligned && aligned(p);
    }
    return {
        arrays_of(arrays, workspace, stream), static_cast<int>(scales.size()), config, nullptr, count, {}, all_aligned};
}

// Calls use(format, std::bool_constant, blocks): whether a block of elements takes a block of threads, and their
// number.
template <class Use>
void with_blocks(const Quantization& config, int64_t count, Use&& use) {
    int64_t blocks = num_blocks(config, count);
    with_format(config, [&](auto format) {
        if (config.block > kOfWarp) return use(format, std::true_type{}, blocks);
        use(format, std::false_type{}, blocks_for(blocks, device::threads_per_block() / device::kWarpSize));
    });
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
                   aligned(codes, x.data, remainder)};
    with_blocks(config, x.count, [&](auto format, auto of_threads, int64_t blocks) {
        device::launch<quantize_kernel<decltype(format), decltype(of_threads)::value>>("quantize", blocks, stream, job);
    });
}

int64_t dequantize_workspace_bytes(std::size_t num_contributions) { return arrays_bytes(2 * num_contributions); }

void dequantize(const std::vector<const float*>& scales, const std::vector<const uint8_t*>& codes,
                const Quantization& config, const Buffer& out, Scale factor, Workspace& workspace, Stream stream) {
    if (out.count == 0) return;
    Dequantizing job = dequantizing(scales, codes, config, out.count, workspace, stream);
    job.out = out.bytes();
    job.factor = factor;
    int64_t blocks = blocks_for(out.count, device::threads_per_block() * kSums * kVectorWidth);
    with_format(config, [&](auto format) {
        device::launch<dequantize_kernel<decltype(format)>>("dequantize", blocks, stream, job);
    });
}

void requantize(const std::vector<const float*>& scales, const std::vector<const uint8_t*>& codes, int64_t count,
                const Quantization& config, const int64_t* seed, const Requantized& out, Workspace& workspace,
                Stream stream) {
    if (count == 0) return;
    Requantizing job{dequantizing(scales, codes, config, count, workspace, stream),
                     {nullptr, count, config, seed, out.scales, reinterpret_cast<char*>(out.codes),
                      reinterpret_cast<char*>(out.remainder), false}};
    job.to.aligned = job.from.aligned && aligned(out.codes, out.remainder);
    with_blocks(config, count, [&](auto format, auto of_threads, int64_t blocks) {
        using Format = decltype(format);
        constexpr bool kBlock = decltype(of_threads)::value;
        if (kBlock || config.block > device::kWarpSize * kSums * kVectorWidth) {
            device::launch<requantize_kernel<Format, kBlock, false>>("requantize", blocks, stream, job);
        } else {
            device::launch<requantize_kernel<Format, kBlock, !kBlock>>("requantize", blocks, stream, job);
        }
    });
}

}  // namespace pycomm::cuda
