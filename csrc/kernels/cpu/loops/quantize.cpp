#include "kernels/cpu/loops/members.h"
#include "kernels/cpu/loops/simd.h"
#include "kernels/fp8.h"
#include "kernels/random.h"

namespace pycomm::PYCOMM_ISA {
namespace {

// Elements are processed 64 at a time: whole bytes at any number of bits. The last few are padded with zeros.
constexpr int kGroup = 64;
constexpr int kVecs = kGroup / kLanes;
constexpr int64_t kLongest = 2048;  // blocks of so many elements lie in the fastest cache, two of them

// Whole numbers: uniform() times 2^24, for elements first ... first + 63, where `first` is a multiple of 64: they
// differ in bits that scrambled() begins to shift out.
inline void random_group(const Seed& seed, int64_t first, float* out) {
    uint32_t x = static_cast<uint32_t>(first) ^ seed.parts[0];
    x ^= x >> 16;
    for (uint32_t j = 0; j < kGroup; ++j) {
        const uint32_t bits = scrambled(scrambled_rest(x ^ j) + seed.parts[1]);
        out[j] = static_cast<float>(static_cast<int32_t>(bits >> 8));
    }
}
constexpr float kRandomUnit = 0x1p-24f;

// How elements become codes: to the nearest, which the largest magnitude as a norm keeps within the levels; to the
// nearest and clamped to these; or by chance.
enum class Rounding : uint8_t { kNearest, kClamped, kRandom };

// Codes in int32 lanes, and minus what they stand for, in units of kUnit times the scale; 0, never -0, for a 0 of x <
// 0.
struct Coded {
    Vec codes, minus;
};

// Formats: code(x, random) takes elements in units of kUnit<rounding> times the scale, and random numbers; load_two
// reads two vectors of codes, and add_multiple(sum, codes, multiplier(scale)) adds what they stand for. kExact:
// products with a scale are exact.
template <int kSize>
struct Ints {
    static constexpr int kBits = kSize;
    static constexpr bool kExact = false;
    template <Rounding>
    static constexpr float kUnit = 1.0f;
    Vec levels, lowest;  // whole numbers

    explicit Ints(int most)
        : levels(splat_bits(static_cast<uint32_t>(most))), lowest(splat_bits(static_cast<uint32_t>(-most))) {}

    template <Rounding kRounding>
    Coded code(Vec x, Vec random) const {
        Vec number;
        if (kRounding == Rounding::kRandom) {
            number = signed_like(lesser_whole(down(fused(random, splat(kRandomUnit), magnitude(x))), levels), x);
        } else {
            number = whole(x);
            if (kRounding == Rounding::kClamped) number = greater_whole(lesser_whole(number, levels), lowest);
        }
        return {number, as_float(sub_bits(splat(0.0f), number))};
    }
    static Vec multiplier(float scale) { return multiplier_of<kBits>(scale); }
    static void load_two(const uint8_t* from, Vec (&out)[2]) {
        out[0] = load_codes<kBits>(from);
        out[1] = load_codes<kBits>(from + kLanes * kBits / 8);
    }
    static Vec add_multiple(Vec sum, Vec codes, Vec multiplier) {
        return add(sum, multiples<kBits>(codes, multiplier));
    }
};

template <CodeType kElement>
struct Floats {
    static constexpr int kBits = 8;
    static constexpr bool kExact = true;
    static constexpr Fp8 kFormat = fp8_of(kElement);
    static constexpr int kShift = 23 - kFormat.mantissa;

    // A power of two times the scale, so that exponents of elements, as code() adds them up, begin at a multiple of
    // 128.
    template <Rounding kRounding>
    static constexpr int kRaised =
        -(127 + kFormat.least + (kRounding == Rounding::kRandom ? 0 : kShift)) & ((128 >> kFormat.mantissa) - 1);
    template <Rounding kRounding>
    static constexpr float kUnit = 1.0f / static_cast<float>(1 << kRaised<kRounding>);

    // A magnitude is a whole number of units of its mantissa's last bit, with its own exponent or the exponent of the
    // smallest normal number. Rounding may make it the next power of two, which this number and exponent stand for too.
    // The code is the number of units plus, above the mantissa, the number of exponents above the least one.
    template <Rounding kRounding>
    Coded code(Vec x, Vec random) const {
        constexpr int kLeast = 127 + kFormat.least + kRaised<kRounding>;
        const Vec level = magnitude(x);
        const Vec exponent = greater_bits(and_bits(x, splat_bits(0xffu << 23)), splat_bits(kLeast << 23));
        Vec units, value;
        if (kRounding == Rounding::kRandom) {
            constexpr auto kMost = static_cast<uint32_t>(kElement == CodeType::kE4M3 ? 0x7e : 0x7b);
            const Vec per_level = sub_bits(splat_bits((254 + kFormat.mantissa) << 23), exponent);
            units = down(fused(random, splat(kRandomUnit), mul(level, per_level)));
            value = mul(as_float(units), sub_bits(exponent, splat_bits(kFormat.mantissa << 23)));
            value = lesser(value, splat(kFormat.largest / kUnit<kRounding>));  // random numbers may round to 1
            units = lesser_whole(code_of(units, exponent), splat_bits(kMost));
        } else {
            constexpr auto kPower = static_cast<float>(1 << kShift);
            const Vec sum = fused(exponent, splat(kPower), level);  // its last bit is a unit
            value = fused(exponent, splat(-kPower), sum);
            units = code_of(sum, sum);
        }
        return {where_negative(x, or_bits(units, splat_bits(~0x7fu)), units), opposed(value, x)};
    }
    static Vec multiplier(float scale) { return splat(scale * (kElement == CodeType::kE4M3 ? 256.0f : 1.0f)); }
    static void load_two(const uint8_t* from, Vec (&out)[2]) { load_fp8<kElement>(from, out); }
    static Vec add_multiple(Vec sum, Vec codes, Vec multiplier) { return fused(codes, multiplier, sum); }

   private:
    static Vec code_of(Vec units, Vec exponent) {
        return and_bits(add_bits(units, shift_down<kShift>(exponent)), splat_bits(0x7f));
    }
};

// Calls use(format).
template <class Use>
inline void with_format(const Quantization& config, Use&& use) {
    if (config.element == CodeType::kE4M3) return use(Floats<CodeType::kE4M3>{});
    if (config.element == CodeType::kE5M2) return use(Floats<CodeType::kE5M2>{});
    if (config.bits == 8) return use(Ints<8>(config.levels));
    if (config.bits == 4) return use(Ints<4>(config.levels));
    use(Ints<2>(config.levels));
}

inline int64_t bytes_of(int bits, int64_t count) { return (count * bits + 7) / 8; }

// A norm, in an order that does not depend on the width of a vector. Magnitudes go by their bits: NaN ranks highest.
class NormOf {
   public:
    explicit NormOf(Norm norm) : norm_(norm) {
        for (Vec& sum : sums_) sum = splat(0.0f);
    }

    // Elements that follow those before; all calls but the last one take a multiple of kSums.
    void take(const float* x, int64_t count) {
        if (norm_ == Norm::kMax) {
            take_all(x, count, [](Vec sum, Vec v) { return greater_bits(sum, magnitude(v)); });
        } else {
            take_all(x, count, [](Vec sum, Vec v) { return add(sum, mul(v, v)); });
        }
    }

    float value() const {
        if (norm_ == Norm::kMax) {
            Vec all = sums_[0];
            for (int u = 1; u < kParts; ++u) all = greater_bits(all, sums_[u]);
            return greatest(all);
        }
        float out = 0.0f;
        for (int j = 0; j < kSums; ++j) out += lane(sums_[j / kLanes], j % kLanes);
        return __builtin_sqrtf(out);
    }

   private:
    static constexpr int kSums = 16, kParts = kSums / kLanes;

    template <class Take>
    void take_all(const float* x, int64_t count, Take&& one) {
        int64_t i = 0;
        for (; i + kSums <= count; i += kSums) {
            prefetch_ahead<2048>(x + i, kSums);
            for (int u = 0; u < kParts; ++u) sums_[u] = one(sums_[u], load(x + i + u * kLanes));
        }
        for (int u = 0; u < kParts && i < count; ++u) {
            int64_t n = count - i < kLanes ? count - i : kLanes;
            sums_[u] = one(sums_[u], load_partial(x + i, n));
            i += n;
        }
    }

    Norm norm_;
    Vec sums_[kParts];
};

inline float scale_of(float norm, const Quantization& config) {
    if (config.element != CodeType::kInt) return bits_float(fp8_scale(float_bits(norm), fp8_of(config.element).most));
    float scale = norm * (1.0f / static_cast<float>(config.levels));
    return scale < kSmallestScale ? 0.0f : scale;
}

// Writes codes of elements, and what is left of them or, if that `adds`, the sum of that and what was there.
template <class Format, Rounding kRounding>
class Encoder {
   public:
    Encoder(const Format& format, float scale, const Seed& seed, bool adds)
        : format_(format),
          size_(splat(scale * kUnit)),
          inverse_(splat(scale == 0.0f ? 0.0f : 1.0f / scale / kUnit)),
          seed_(seed),
          adds_(adds) {}

    // Elements from number `first` on.
    void encode(const float* x, int64_t count, int64_t first, uint8_t* codes, float* remainder) const {
        int64_t i = 0;
        for (; i + kGroup <= count; i += kGroup) {
            group(x + i, first + i, codes + i * Format::kBits / 8, remainder == nullptr ? nullptr : remainder + i);
        }
        if (i == count) return;
        const int64_t n = count - i;
        const auto bytes = static_cast<size_t>(n) * sizeof(float);
        float padded[kGroup] = {}, left[kGroup] = {};
        uint8_t padded_codes[kGroup * Format::kBits / 8];
        __builtin_memcpy(padded, x + i, bytes);
        if (remainder != nullptr) __builtin_memcpy(left, remainder + i, bytes);
        group(padded, first + i, padded_codes, left);
        if (remainder != nullptr) __builtin_memcpy(remainder + i, left, bytes);
        __builtin_memcpy(codes + i * Format::kBits / 8, padded_codes, static_cast<size_t>(bytes_of(Format::kBits, n)));
    }

   private:
    static constexpr float kUnit = Format::template kUnit<kRounding>;
    static constexpr bool kRandom = kRounding == Rounding::kRandom;

    void group(const float* x, int64_t first, uint8_t* codes, float* remainder) const {
        float random[kGroup];
        if (kRandom) random_group(seed_, first, random);
        Vec coded[kVecs];
        for (int u = 0; u < kVecs; ++u) {
            Vec v = load(x + u * kLanes);
            Vec chance = kRandom ? load(random + u * kLanes) : v;
            Coded one = format_.template code<kRounding>(mul(v, inverse_), chance);
            coded[u] = one.codes;
            if (remainder == nullptr) continue;
            Vec left = Format::kExact ? fused(one.minus, size_, v) : add(v, mul(one.minus, size_));
            if (adds_) left = add(load(remainder + u * kLanes), left);
            store(remainder + u * kLanes, left);
        }
        store_codes<Format::kBits>(codes, coded);
    }

    Format format_;
    Vec size_, inverse_;
    Seed seed_;
    bool adds_;
};

// Contributions: the scales and the codes of the same elements from several ranks.
struct Sum {
    const float* const* scales;
    const uint8_t* const* codes;
    int num_contributions;

    // Writes factor times the sums of elements [begin, begin + count), all of one block. A function of its own, so that
    // its pointers stay in registers.
    template <class Format, bool kStreaming = false>
    __attribute__((noinline)) void write(int64_t block, int64_t begin, int64_t count, float factor, float* out) const {
        int64_t i = 0;
        for (; i + kGroup <= count; i += kGroup) {
            group<Format, kStreaming>(block, factor, out + i,
                                      [&](int p) { return codes[p] + (begin + i) * Format::kBits / 8; });
        }
        if (i == count) return;
        const int64_t n = count - i;
        uint8_t padded[kGroup * Format::kBits / 8] = {};
        float sums[kGroup];
        group<Format, false>(block, factor, sums, [&](int p) {
            const uint8_t* from = codes[p] + (begin + i) * Format::kBits / 8;
            __builtin_memcpy(padded, from, static_cast<size_t>(bytes_of(Format::kBits, n)));
            return static_cast<const uint8_t*>(padded);
        });
        __builtin_memcpy(out + i, sums, static_cast<size_t>(n) * sizeof(float));
    }

   private:
    // codes_of(p): codes of the group's elements from contribution p.
    template <class Format, bool kStreaming, class CodesOf>
    void group(int64_t block, float factor, float* out, CodesOf&& codes_of) const {
        Vec sums[kVecs];
        for (Vec& sum : sums) sum = splat(0.0f);
        for (int p = 0; p < num_contributions; ++p) {
            const Vec multiplier = Format::multiplier(scales[p][block]);
            const uint8_t* from = codes_of(p);
            for (int u = 0; u < kVecs; u += 2) {
                Vec two[2];
                Format::load_two(from + u * kLanes * Format::kBits / 8, two);
                sums[u] = Format::add_multiple(sums[u], two[0], multiplier);
                sums[u + 1] = Format::add_multiple(sums[u + 1], two[1], multiplier);
            }
        }
        for (int u = 0; u < kVecs; ++u) {
            const Vec sum = mul(sums[u], splat(factor));
            kStreaming ? stream(out + u * kLanes, sum) : store(out + u * kLanes, sum);
        }
    }
};

// Calls use(number, begin, count) for every block of `count` elements.
template <class Use>
inline void for_blocks(int64_t block, int64_t count, Use&& use) {
    int64_t number = 0;
    for (int64_t begin = 0; begin < count; begin += block) {
        use(number++, begin, count - begin < block ? count - begin : block);
    }
}

// Calls measure(number, begin, count) for every block of `count` elements, which returns its norm, and then
// encode(encoder, number, begin, count). The norm of a short block is found before the one ahead is encoded: nothing
// waits for it then.
template <class Format, class Measure, class Encode>
inline void encode_blocks(const Format& format, int64_t count, const Quantization& config, const int64_t* seed,
                          bool adds, float* scales, Measure&& measure, Encode&& encode) {
    const Seed numbers = seed == nullptr ? Seed{} : mixed(seed);
    auto encode_one = [&](float norm, int64_t number, int64_t begin, int64_t n) {
        const float scale = scale_of(norm, config);
        __builtin_memcpy(scales + number, &scale, sizeof scale);
        auto with = [&](auto rounding) {
            encode(Encoder<Format, decltype(rounding)::value>(format, scale, numbers, adds), number, begin, n);
        };
        if (seed != nullptr) return with(std::integral_constant<Rounding, Rounding::kRandom>());
        if (!Format::kExact && config.norm != Norm::kMax) {
            return with(std::integral_constant<Rounding, Rounding::kClamped>());
        }
        with(std::integral_constant<Rounding, Rounding::kNearest>());
    };
    const bool ahead = config.block <= kLongest;
    float before = 0.0f;
    for_blocks(config.block, count, [&](int64_t number, int64_t begin, int64_t n) {
        const float norm = measure(number, begin, n);
        if (!ahead) return encode_one(norm, number, begin, n);
        if (number > 0) encode_one(before, number - 1, begin - config.block, config.block);
        before = norm;
        if (begin + n == count) encode_one(norm, number, begin, n);
    });
}

}  // namespace

void quantize(const float* x, int64_t count, int64_t first, const Quantization& config, const int64_t* seed,
              float* scales, uint8_t* codes, float* remainder) {
    with_format(config, [&](auto format) {
        auto measure = [&](int64_t, int64_t begin, int64_t n) {
            NormOf norm(config.norm);
            norm.take(x + begin, n);
            return norm.value();
        };
        auto encode = [&](const auto& encoder, int64_t, int64_t begin, int64_t n) {
            encoder.encode(x + begin, n, first + begin, codes + begin * format.kBits / 8,
                           remainder == nullptr ? nullptr : remainder + begin);
        };
        encode_blocks(format, count, config, seed, false, scales, measure, encode);
    });
}

void dequantize(const float* const* scales, const uint8_t* const* codes, int num_contributions,
                const Quantization& config, float* out, int64_t count, float factor, Store mode) {
    const Sum sum{scales, codes, num_contributions};
    // Sums of several are bound by instructions: streaming makes sums of 4-bit codes slower (measured on Zen 3).
    const bool streams = mode == Store::kStreaming && num_contributions == 1 && is_aligned(out, 64);
    with_format(config, [&](auto format) {
        using Format = decltype(format);
        for_blocks(config.block, count, [&](int64_t number, int64_t begin, int64_t n) {
            if (streams) return sum.write<Format, true>(number, begin, n, factor, out + begin);
            sum.write<Format>(number, begin, n, factor, out + begin);
        });
    });
    if (streams) fence_streams();
}

void requantize(const float* const* scales, const uint8_t* const* codes, int num_contributions, int64_t count,
                int64_t first, const Quantization& config, const int64_t* seed, float* out_scales, uint8_t* out_codes,
                float* remainder) {
    float sums[2][kLongest];  // of one block and the next; for longer blocks they are computed twice, part by part
    const Sum sum{scales, codes, num_contributions};
    const bool kept = config.block <= kLongest;
    with_format(config, [&](auto format) {
        auto for_parts = [&](int64_t number, int64_t begin, int64_t n, bool made, auto&& use) {
            float* const to = sums[number % 2];
            for_blocks(kLongest, n, [&](int64_t, int64_t at, int64_t size) {
                if (!made) sum.write<decltype(format)>(number, begin + at, size, 1.0f, to);
                use(to, begin + at, size);
            });
        };
        auto measure = [&](int64_t number, int64_t begin, int64_t n) {
            NormOf norm(config.norm);
            for_parts(number, begin, n, false, [&](const float* x, int64_t, int64_t size) { norm.take(x, size); });
            return norm.value();
        };
        auto encode = [&](const auto& encoder, int64_t number, int64_t begin, int64_t n) {
            for_parts(number, begin, n, kept, [&](const float* x, int64_t at, int64_t size) {
                encoder.encode(x, size, first + at, out_codes + at * format.kBits / 8,
                               remainder == nullptr ? nullptr : remainder + at);
            });
        };
        encode_blocks(format, count, config, seed, true, out_scales, measure, encode);
    });
}

}  // namespace pycomm::PYCOMM_ISA
