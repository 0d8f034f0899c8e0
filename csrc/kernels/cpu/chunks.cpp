#include "kernels/chunks.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/half.h"
#include "base/parallel.h"
#include "kernels/cpu/accumulation_pass.h"
#include "kernels/cpu/pieces.h"
#include "kernels/cpu/selection.h"

namespace pycomm {
namespace {

inline uint32_t key_of(uint32_t bits) { return std::min(bits & 0x7fffffffu, kInfKey + 1); }

// Entries of one chunk after the other; memory, and where the last chunk's entries began, serve the next one.
class ChunkSelection {
   public:
    explicit ChunkSelection(const ChunkFormat& config) : list_(static_cast<size_t>(config.size + kCollectSlack)) {}

    // The k largest, by ascending index, as the first k of list(). Returns the key of the smallest.
    uint32_t select(const float* x, const ChunkLayout& layout) {
        const int64_t num = candidates(x, layout);
        keys_.clear();
        for (int64_t i = 0; i < num; ++i) keys_.push_back(key_of(list_[static_cast<size_t>(i)].bits));
        std::nth_element(keys_.begin(), keys_.begin() + (layout.k - 1), keys_.end(), std::greater<>());
        kth_ = keys_[static_cast<size_t>(layout.k - 1)];
        int64_t ties = layout.k - std::count_if(keys_.begin(), keys_.begin() + (layout.k - 1),
                                                [this](uint32_t key) { return key > kth_; });
        size_t out = 0;
        for (size_t i = 0; i < static_cast<size_t>(num); ++i) {
            const uint32_t key = key_of(list_[i].bits);
            if (key > kth_ || (key == kth_ && ties-- > 0)) list_[out++] = list_[i];
        }
        return kth_;
    }
    const Candidate* list() const { return list_.data(); }

   private:
    // At least k elements, among which the k largest are. Where the search begins saves work and changes no result.
    int64_t candidates(const float* x, const ChunkLayout& layout) {
        const uint32_t above = searched(x, layout);
        const int64_t room = static_cast<int64_t>(list_.size());
        const int64_t found = loops().collect(x, layout.count, bits_float(above), 0, list_.data(), room);
        if (found >= layout.k) return found;
        // Fewer than k are above 0. Where none is, the first k are the largest, and otherwise all must be looked at.
        const int taken = found == 0 ? layout.k : layout.count;
        for (int i = 0; i < taken; ++i) list_[static_cast<size_t>(i)] = {float_bits(x[i]), static_cast<uint32_t>(i)};
        return taken;
    }

    // A key that at least k elements exceed, and not many more, if there is such a key; otherwise 0. From the k-th key
    // of the chunk before, in steps that double until there is a key on either side.
    uint32_t searched(const float* x, const ChunkLayout& layout) const {
        constexpr uint32_t kFirstStep = 1u << 21;  // of keys: a quarter to an eighth of a magnitude
        const int64_t many = 2 * static_cast<int64_t>(layout.k) + 16;
        uint32_t low = 0, high = kInfKey, step = kFirstStep;
        uint32_t at = kth_ > kFirstStep / 2 && kth_ < kInfKey ? kth_ - kFirstStep / 2 : float_bits(1.0f);
        for (int i = 0; i < 24; ++i) {
            const int64_t found = loops().count_above(x, layout.count, bits_float(at));
            if (found >= layout.k && found <= many) return at;
            (found < layout.k ? high : low) = at;
            if (low > 0 && high < kInfKey) {
                at = low + (high - low) / 2;
                if (at == low) break;
            } else if (low > 0) {
                at = low + std::min(step, (kInfKey - low) / 2);
            } else if (high <= step) {
                break;  // almost all of them are 0
            } else {
                at = high - step;
            }
            step *= 2;
        }
        return low;
    }

    std::vector<Candidate> list_;
    std::vector<uint32_t> keys_;
    uint32_t kth_ = 0;
};

// The two magnitudes of a chunk with these entries, the smallest of which has key `kth`.
uint32_t word_of(const Candidate* entries, int k, uint32_t kth, int bits) {
    uint32_t top = 0;
    for (int m = 0; m < k; ++m) top = std::max(top, key_of(entries[m].bits));
    if (top >= kInfKey) return kNoFiniteWord;
    if (bits_float(top) < kSmallestScale) return 0;
    if (bits > 2) return chunk_word(kth, top);
    uint64_t total = 0, below = 0, num_below = 0;
    for (int m = 0; m < k; ++m) total += fixed_of(key_of(entries[m].bits), top);
    const uint64_t mean = total / static_cast<uint64_t>(k);
    for (int m = 0; m < k; ++m) {
        const uint32_t fixed = fixed_of(key_of(entries[m].bits), top);
        if (fixed > mean) continue;
        below += fixed;
        ++num_below;
    }
    const uint64_t num_above = static_cast<uint64_t>(k) - num_below, low = below / num_below;
    const uint64_t high = num_above == 0 ? low : (total - below) / num_above;
    const float unit = bits_float(unit_bits_of(top));
    return chunk_word(float_bits(static_cast<float>(low) * unit), float_bits(static_cast<float>(high) * unit));
}

ChunkLevels levels_of(uint32_t word, int bits) {
    return ChunkLevels::of(bits_float(word << 16), bits_float(word & 0xffff0000u), bits);
}

inline void put_bits(uint32_t* words, int64_t at, int width, uint32_t value) {
    words[at / 32] |= value << (at % 32);
    if (at % 32 + width > 32) words[at / 32 + 1] |= value >> (32 - at % 32);
}

inline uint32_t get_bits(const uint32_t* words, int64_t at, int width) {
    uint64_t two = words[at / 32];
    if (at % 32 + width > 32) two |= static_cast<uint64_t>(words[at / 32 + 1]) << 32;
    return static_cast<uint32_t>(two >> (at % 32)) & ((1u << width) - 1);
}

void pack_chunk(const float* x, const ChunkLayout& layout, int bits, ChunkSelection& selection, uint32_t* words,
                float* remainder, float decay) {
    const uint32_t kth = selection.select(x, layout);
    const Candidate* entries = selection.list();
    std::memset(words, 0, static_cast<size_t>(layout.words) * sizeof(uint32_t));
    words[0] = word_of(entries, layout.k, kth, bits);
    const ChunkLevels levels = levels_of(words[0], bits);
    if (remainder != nullptr && (decay != 1.0f || remainder != x)) {
        for (int i = 0; i < layout.count; ++i) remainder[i] = x[i] * decay;
    }
    const int width = layout.low + bits;
    for (int m = 0; m < layout.k; ++m) {
        const uint32_t index = entries[m].index, sign = entries[m].bits >> 31;
        const int level = level_of(levels, bits_float(entries[m].bits & 0x7fffffffu));
        const uint32_t code = sign << (bits - 1) | static_cast<uint32_t>(level);
        put_bits(words, 32 + static_cast<int64_t>(index >> layout.low) + m, 1, 1);
        put_bits(words, layout.fields_at + static_cast<int64_t>(m) * width, width,
                 (index & ((1u << layout.low) - 1)) | code << layout.low);
        if (remainder == nullptr) continue;
        const float magnitude = magnitude_of(levels, level), value = bits_float(entries[m].bits);
        remainder[index] = (value - (sign != 0 ? -magnitude : magnitude)) * decay;
    }
}

// Adds a chunk's entries to out. Returns false where pack_chunk cannot have made the words.
bool add_chunk(const uint32_t* words, const ChunkLayout& layout, int bits, float* out) {
    const ChunkLevels levels = levels_of(words[0], bits);
    const int width = layout.low + bits;
    int m = 0;
    int64_t last = -1;
    for (int at = 0; at < layout.upper_bits; at += 32) {
        const int here = std::min(32, layout.upper_bits - at);
        uint32_t upper = words[1 + at / 32] & static_cast<uint32_t>((uint64_t{1} << here) - 1);
        for (; upper != 0; upper &= upper - 1, ++m) {
            if (m == layout.k) return false;
            const uint32_t field = get_bits(words, layout.fields_at + static_cast<int64_t>(m) * width, width);
            const int64_t higher = at + __builtin_ctz(upper) - m;
            const int64_t index = higher << layout.low | (field & ((1u << layout.low) - 1));
            if (index <= last || index >= layout.count) return false;
            last = index;
            const uint32_t code = field >> layout.low;
            const float magnitude = magnitude_of(levels, static_cast<int>(code & ((1u << (bits - 1)) - 1)));
            out[index] += code >> (bits - 1) != 0 ? -magnitude : magnitude;
        }
    }
    return m == layout.k;
}

}  // namespace

void pack_chunks(const Buffer& x, const ChunkFormat& config, uint32_t* words, float* remainder, float decay,
                 int num_threads) {
    const ChunkLayouts layouts(config, x.count);
    int threads = useful_threads(x.num_bytes(), num_threads);
    parallel_for(threads, threads, [&](int thread) {
        Range mine = piece_of(x.count, thread, threads, config.size);
        if (mine.size() == 0) return;
        ChunkSelection selection(config);
        for (int64_t begin = mine.begin; begin < mine.end; begin += config.size) {
            const int64_t chunk = begin / config.size;
            pack_chunk(static_cast<const float*>(x.data) + begin, chunk < layouts.whole ? layouts.each : layouts.last,
                       config.bits, selection, words + chunk * layouts.each.words,
                       remainder == nullptr ? nullptr : remainder + begin, decay);
        }
    });
}

void accumulate_chunks(const Accumulation& job, double scale, bool* finite, const ChunkFormat& config, uint32_t* words,
                       float decay, int num_threads) {
    const AccumulationPass pass(job, scale, num_threads);
    const ChunkLayouts layouts(config, job.acc.count);
    pass.run_threads(finite, [&](int thread, uint8_t* infinite) {
        ChunkSelection selection(config);
        pass.sum_steps(thread, {0, job.acc.count}, config.size, true, infinite, [&](Range range, float* sums) {
            const int64_t chunk = range.begin / config.size;
            pack_chunk(sums, chunk < layouts.whole ? layouts.each : layouts.last, config.bits, selection,
                       words + chunk * layouts.each.words, sums, decay);
        });
    });
}

void unpack_chunks(const std::vector<const uint32_t*>& words, const ChunkFormat& config, const Buffer& out,
                   double factor, int num_threads) {
    const ChunkLayouts layouts(config, out.count);
    const auto by = static_cast<float>(factor);
    int threads = useful_threads(out.num_bytes(), num_threads);
    std::atomic<int64_t> wrong{-1};  // number of a contribution
    parallel_for(threads, threads, [&](int thread) {
        Range mine = piece_of(out.count, thread, threads, config.size);
        std::vector<float> sums(static_cast<size_t>(config.size));
        for (int64_t begin = mine.begin; begin < mine.end; begin += config.size) {
            const int64_t chunk = begin / config.size;
            const ChunkLayout& layout = chunk < layouts.whole ? layouts.each : layouts.last;
            float* const to = sums.data();
            std::fill(to, to + layout.count, 0.0f);
            for (size_t p = 0; p < words.size(); ++p) {
                if (!add_chunk(words[p] + chunk * layouts.each.words, layout, config.bits, to)) {
                    wrong = static_cast<int64_t>(p);
                }
            }
            for (int i = 0; i < layout.count && by != 1.0f; ++i) to[i] *= by;
            loops().copy(to, static_cast<float*>(out.data) + begin, layout.count * static_cast<int64_t>(sizeof(float)),
                         store_of(out));
        }
    });
    if (wrong >= 0) {
        throw ArgumentError(format("words[%lld] was not made by pack_chunks from %lld elements in this format",
                                   static_cast<long long>(wrong), static_cast<long long>(out.count)));
    }
}

}  // namespace pycomm
