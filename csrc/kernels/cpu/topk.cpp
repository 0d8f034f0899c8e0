#include "kernels/topk.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "base/half.h"
#include "base/parallel.h"
#include "kernels/cpu/loops/loops.h"
#include "kernels/cpu/selection.h"

namespace pycomm {
namespace {

template <class T>
T load(const void* base, int64_t i) {
    T value;
    std::memcpy(&value, static_cast<const char*>(base) + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
}

// Keys order magnitudes as unsigned integers. All NaNs share the one key above inf.
constexpr uint32_t kNanKey = 0x7f800001u;
inline uint32_t canonical(uint32_t magnitude_bits) { return std::min(magnitude_bits, kNanKey); }

struct FloatKeys {
    using Key = uint32_t;
    static Key of(const void* x, int64_t i) { return canonical(load<uint32_t>(x, i) & 0x7fffffffu); }
};
struct CandidateKeys {
    using Key = uint32_t;
    static Key of(const void* x, int64_t i) { return canonical(load<Candidate>(x, i).bits & 0x7fffffffu); }
};
struct F16Keys {
    using Key = uint32_t;
    static Key of(const void* x, int64_t i) { return std::min<uint32_t>(load<uint16_t>(x, i) & 0x7fffu, 0x7c01u); }
};
struct BF16Keys {
    using Key = uint32_t;
    static Key of(const void* x, int64_t i) { return std::min<uint32_t>(load<uint16_t>(x, i) & 0x7fffu, 0x7f81u); }
};
struct DoubleKeys {
    using Key = uint64_t;
    static Key of(const void* x, int64_t i) {
        return std::min<uint64_t>(load<uint64_t>(x, i) & 0x7fffffffffffffffull, 0x7ff0000000000001ull);
    }
};

template <class Key>
struct Threshold {
    Key key;           // the k-th largest key
    int64_t num_ties;  // how many of the elements with exactly this key belong to the top k
};

// The k-th largest key by radix selection, 11 bits at a time from the top: one read of x per digit.
template <class Keys>
Threshold<typename Keys::Key> select_kth(const void* x, int64_t count, int64_t k) {
    using Key = typename Keys::Key;
    constexpr int kDigitBits = 11;
    constexpr int kKeyBits = 8 * sizeof(Key);
    std::vector<int64_t> histogram(1u << kDigitBits);
    Key prefix = 0, decided = 0;
    int64_t wanted = k;
    for (int high = kKeyBits; high > 0; high -= kDigitBits) {
        int low = std::max(0, high - kDigitBits);
        Key digit_mask = (Key{1} << (high - low)) - 1;
        std::fill(histogram.begin(), histogram.end(), 0);
        for (int64_t i = 0; i < count; ++i) {
            Key key = Keys::of(x, i);
            if ((key & decided) == prefix) ++histogram[static_cast<size_t>((key >> low) & digit_mask)];
        }
        Key digit = digit_mask;
        while (histogram[static_cast<size_t>(digit)] < wanted) wanted -= histogram[static_cast<size_t>(digit--)];
        prefix |= digit << low;
        decided |= digit_mask << low;
    }
    return {prefix, wanted};
}

// Calls emit(i) for the top k in ascending order of i.
template <class Keys, class Emit>
void for_selected(const void* x, int64_t count, Threshold<typename Keys::Key> threshold, Emit&& emit) {
    int64_t ties_left = threshold.num_ties;
    for (int64_t i = 0; i < count; ++i) {
        auto key = Keys::of(x, i);
        if (key > threshold.key || (key == threshold.key && ties_left-- > 0)) emit(i);
    }
}

// Selects from x itself; returns the key of the k-th.
template <class Keys, class T>
typename Keys::Key select_all(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices) {
    int64_t out = 0;
    Threshold<typename Keys::Key> threshold = select_kth<Keys>(x.data, x.count, k);
    for_selected<Keys>(x.data, x.count, threshold, [&](int64_t i) {
        auto index = static_cast<int32_t>(i);
        T value = load<T>(x.data, i);
        std::memcpy(values.bytes() + out * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
        std::memcpy(indices + out, &index, sizeof(index));
        ++out;
    });
    return threshold.key;
}

// A key that about `wanted` elements exceed, from 2,048 cache lines spread evenly over x.
uint32_t sample_threshold(const Buffer& x, int64_t wanted) {
    constexpr int64_t kLines = 2048, kPerLine = 16;
    std::vector<uint32_t> sample;
    sample.reserve(kLines * kPerLine);
    for (int64_t line = 0; line < kLines; ++line) {
        int64_t begin = (x.count - kPerLine) / kLines * line;
        for (int64_t i = 0; i < kPerLine; ++i) sample.push_back(FloatKeys::of(x.data, begin + i));
    }
    double expected = static_cast<double>(sample.size()) * static_cast<double>(wanted) / static_cast<double>(x.count);
    // Four standard deviations of slack: one miss in 30,000 on independent data.
    auto rank = static_cast<int64_t>(expected + 4.0 * std::sqrt(expected) + 4.0);
    if (rank >= static_cast<int64_t>(sample.size())) return 0;
    std::nth_element(sample.begin(), sample.begin() + rank, sample.end(), std::greater<>());
    return sample[static_cast<size_t>(rank)];
}

struct Collected {
    std::unique_ptr<Candidate[]> data;
    int64_t capacity = 0, count = 0;
};

// Everything above `threshold`, one list per thread, in order of index; false when a list ran full.
bool collect_candidates(const Buffer& x, uint32_t threshold, int64_t capacity, int threads,
                        std::vector<Collected>& lists) {
    lists.resize(static_cast<size_t>(threads));
    parallel_for(threads, threads, [&](int thread) {
        Range mine = piece_of(x.count, thread, threads, 64);
        Collected& list = lists[static_cast<size_t>(thread)];
        list.capacity = std::min(capacity, mine.size()) + kCollectSlack;
        list.data.reset(new Candidate[static_cast<size_t>(list.capacity)]);
        int64_t seen =
            loops().collect(reinterpret_cast<const float*>(x.bytes() + mine.begin * 4), mine.size(), threshold,
                            static_cast<uint32_t>(mine.begin), list.data.get(), list.capacity, &list.count);
        if (seen < mine.size()) list.count = -1;
    });
    return std::none_of(lists.begin(), lists.end(), [](const Collected& list) { return list.count < 0; });
}

struct Candidates {
    std::unique_ptr<Candidate[]> data;
    int64_t count;
};

// Candidates above `threshold`, in order of index; none when they are fewer than k, or more than there is room for.
std::optional<Candidates> candidates_above(const Buffer& x, uint32_t threshold, int64_t k, int num_threads) {
    int threads = useful_threads(x.num_bytes(), num_threads);
    std::vector<Collected> lists;
    if (!collect_candidates(x, threshold, 2 * k + x.count / 128, threads, lists)) return std::nullopt;
    int64_t total = 0;
    for (const Collected& list : lists) total += list.count;
    if (total < k) return std::nullopt;
    if (threads == 1) return Candidates{std::move(lists[0].data), total};
    std::unique_ptr<Candidate[]> joined(new Candidate[static_cast<size_t>(total)]);
    int64_t at = 0;
    for (const Collected& list : lists) {
        std::memcpy(joined.get() + at, list.data.get(), static_cast<size_t>(list.count) * sizeof(Candidate));
        at += list.count;
    }
    return Candidates{std::move(joined), total};
}

std::optional<Candidates> find_candidates(const Buffer& x, int64_t k, const float* earlier, int num_threads) {
    constexpr int64_t kSmall = 1 << 16;  // sampling costs more than it saves
    if (x.count < kSmall || k > x.count / 4) return std::nullopt;
    if (earlier != nullptr && *earlier > 0.0f && std::isfinite(*earlier)) {
        auto found = candidates_above(x, float_bits(kThresholdHint * *earlier), k, num_threads);
        if (found) return found;
    }
    return candidates_above(x, sample_threshold(x, k), k, num_threads);
}

float select(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices, const float* earlier,
             int num_threads) {
    switch (x.dtype) {
        case DType::kF16:
            return to_float(F16{static_cast<uint16_t>(select_all<F16Keys, uint16_t>(x, k, values, indices))});
        case DType::kBF16:
            return to_float(BF16{static_cast<uint16_t>(select_all<BF16Keys, uint16_t>(x, k, values, indices))});
        case DType::kF64: {
            uint64_t key = select_all<DoubleKeys, double>(x, k, values, indices);
            double magnitude;
            std::memcpy(&magnitude, &key, sizeof(magnitude));
            return static_cast<float>(magnitude);
        }
        default: {
            auto found = find_candidates(x, k, earlier, num_threads);
            if (found) return select_from(found->data.get(), found->count, k, values, indices);
            return bits_float(select_all<FloatKeys, float>(x, k, values, indices));
        }
    }
}

}  // namespace

float select_from(const Candidate* candidates, int64_t num_candidates, int64_t k, const Buffer& values,
                  int32_t* indices) {
    int64_t out = 0;
    Threshold<uint32_t> threshold = select_kth<CandidateKeys>(candidates, num_candidates, k);
    for_selected<CandidateKeys>(candidates, num_candidates, threshold, [&](int64_t i) {
        auto index = static_cast<int32_t>(candidates[i].index);
        std::memcpy(values.bytes() + 4 * out, &candidates[i].bits, 4);
        std::memcpy(indices + out, &index, 4);
        ++out;
    });
    return bits_float(threshold.key);
}

void topk(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices, float* threshold, int num_threads) {
    float magnitude = select(x, k, values, indices, threshold, num_threads);
    if (threshold != nullptr) *threshold = magnitude;
}

}  // namespace pycomm
