#include "kernels/topk.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/half.h"
#include "base/parallel.h"
#include "kernels/cpu/loops/loops.h"
#include "kernels/cpu/pieces.h"
#include "kernels/cpu/selection.h"

namespace pycomm {
namespace {

template <class T>
T load(const void* base, int64_t i) {
    T value;
    std::memcpy(&value, static_cast<const char*>(base) + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
}

struct FloatKeys {
    using Key = uint32_t;
    static constexpr Key kMost = kInfKey + 1;
    static Key of(const void* x, int64_t i) { return std::min(load<uint32_t>(x, i) & 0x7fffffffu, kMost); }
};
struct CandidateKeys {
    using Key = uint32_t;
    static constexpr Key kMost = FloatKeys::kMost;
    static Key of(const void* x, int64_t i) { return std::min(load<Candidate>(x, i).bits & 0x7fffffffu, kMost); }
};
struct F16Keys {
    using Key = uint32_t;
    static constexpr Key kMost = 0x7c01u;
    static Key of(const void* x, int64_t i) { return std::min<Key>(load<uint16_t>(x, i) & 0x7fffu, kMost); }
};
struct BF16Keys {
    using Key = uint32_t;
    static constexpr Key kMost = 0x7f81u;
    static Key of(const void* x, int64_t i) { return std::min<Key>(load<uint16_t>(x, i) & 0x7fffu, kMost); }
};
struct DoubleKeys {
    using Key = uint64_t;
    static constexpr Key kMost = 0x7ff0000000000001ull;
    static Key of(const void* x, int64_t i) {
        return std::min<Key>(load<uint64_t>(x, i) & 0x7fffffffffffffffull, kMost);
    }
};

template <class Key>
struct Threshold {
    Key key;           // the k-th largest key
    int64_t num_ties;  // how many of the elements with exactly this key belong to the top k
    bool all_ties;     // all of them
};

// The k-th largest key. Keys lie in [least, most]: a histogram of that range by its upper bits says in which bin the
// k-th lies, and so on in this bin. `guess` is where the range of the first histogram ends; what lies above is counted
// in its last bin.
template <class Keys>
class KthLargest {
    using Key = typename Keys::Key;

   public:
    KthLargest(int64_t k, Key least, Key most) : wanted_(k), least_(least), most_(most) {}

    Threshold<Key> of(const void* x, int64_t count, Key guess) {
        Key end = std::min(guess, most_);
        while (true) {
            const int64_t in_bin = narrow(x, count, end);
            if (least_ == most_) return {least_, wanted_, wanted_ == in_bin};
            if (in_bin <= kFew) return among(few_of(x, count, in_bin));
            end = most_;
        }
    }

   private:
    static constexpr int64_t kFew = 1 << 14;  // keys that are copied, rather than found again
    static constexpr int kDigitBits = 11;

    // Makes one bin the range; returns how many keys it holds.
    int64_t narrow(const void* x, int64_t count, Key end) {
        const int width = 64 - __builtin_clzll(static_cast<uint64_t>(end - least_) | 1);
        const int shift = std::max(0, width - kDigitBits);
        const Key last = (end - least_) >> shift;
        std::array<uint32_t, 1 << kDigitBits> histogram{};
        for (int64_t i = 0; i < count; ++i) {
            const Key key = Keys::of(x, i);
            if (key - least_ > most_ - least_) continue;
            ++histogram[static_cast<size_t>(std::min<Key>((key - least_) >> shift, last))];
        }
        Key bin = last;
        while (histogram[static_cast<size_t>(bin)] < wanted_) wanted_ -= histogram[static_cast<size_t>(bin--)];
        least_ += bin << shift;
        if (bin != last) most_ = least_ + ((Key{1} << shift) - 1);
        return histogram[static_cast<size_t>(bin)];
    }

    // The keys in the range; nothing branches on them.
    std::vector<Key> few_of(const void* x, int64_t count, int64_t in_range) const {
        std::vector<Key> few(static_cast<size_t>(in_range) + 1);
        size_t found = 0;
        for (int64_t i = 0; i < count; ++i) {
            few[found] = Keys::of(x, i);
            found += few[found] - least_ <= most_ - least_;
        }
        few.pop_back();
        return few;
    }

    Threshold<Key> among(std::vector<Key> few) {
        auto kth = few.begin() + (wanted_ - 1);
        std::nth_element(few.begin(), kth, few.end(), std::greater<>());
        const int64_t num_ties = wanted_ - std::count_if(few.begin(), kth, [&](Key key) { return key > *kth; });
        return {*kth, num_ties, num_ties == std::count(few.begin(), few.end(), *kth)};
    }

    int64_t wanted_;
    Key least_, most_;
};

// Calls emit(i, place) for the top k in ascending order of i and of place. Nothing branches on the keys: it is called
// for other i too, and the next call is then for the same place.
template <class Keys, class Emit>
void for_selected(const void* x, int64_t k, Threshold<typename Keys::Key> threshold, Emit&& emit) {
    int64_t i = 0, found = 0;
    for (; threshold.all_ties && found < k; ++i) {
        emit(i, found);
        found += Keys::of(x, i) >= threshold.key;
    }
    for (; found < k; ++i) {
        auto key = Keys::of(x, i);
        const bool tie = key == threshold.key && threshold.num_ties > 0;
        threshold.num_ties -= tie;
        emit(i, found);
        found += tie || key > threshold.key;
    }
}

// Selects from x itself; returns the key of the k-th.
template <class Keys, class T>
typename Keys::Key select_all(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices) {
    auto threshold = KthLargest<Keys>(k, 0, Keys::kMost).of(x.data, x.count, Keys::kMost);
    for_selected<Keys>(x.data, k, threshold, [&](int64_t i, int64_t place) {
        auto index = static_cast<int32_t>(i);
        T value = load<T>(x.data, i);
        std::memcpy(values.bytes() + place * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
        std::memcpy(indices + place, &index, sizeof(index));
    });
    return threshold.key;
}

// A magnitude that about `wanted` elements exceed, from cache lines spread evenly over x.
float sample_limit(const Buffer& x, int64_t wanted) {
    const SamplePlan plan(x.count);
    std::vector<float> sample(static_cast<size_t>(plan.size()));
    for (int64_t run = 0; run < plan.num_runs; ++run) {
        std::memcpy(sample.data() + run * kSampleRun, element_of(x, run * plan.apart), kSampleRun * sizeof(float));
    }
    return limit_of_sample(sample.data(), plan.size(), x.count, wanted);
}

struct Collected {
    std::unique_ptr<Candidate[]> data;
    int64_t count = 0;
};

// Everything above `limit`, one list per thread, in order of index; false when a list ran full.
bool collect_candidates(const Buffer& x, float limit, int64_t k, int threads, std::vector<Collected>& lists) {
    lists.resize(static_cast<size_t>(threads));
    parallel_for(threads, threads, [&](int thread) {
        Range mine = piece_of(x.count, thread, threads, 64);
        Collected& list = lists[static_cast<size_t>(thread)];
        const int64_t room = room_for_candidates(mine.size(), k);
        list.data.reset(new Candidate[static_cast<size_t>(room)]);
        list.count = loops().collect(reinterpret_cast<const float*>(element_of(x, mine.begin)), mine.size(), limit,
                                     static_cast<uint32_t>(mine.begin), list.data.get(), room);
    });
    return std::none_of(lists.begin(), lists.end(), [](const Collected& list) { return list.count < 0; });
}

struct Candidates {
    std::unique_ptr<Candidate[]> data;
    int64_t count;
    float limit;
};

// Candidates above `limit`, in order of index; none when they are fewer than k, or more than there is room for.
std::optional<Candidates> candidates_above(const Buffer& x, float limit, int64_t k, int num_threads) {
    int threads = useful_threads(x.num_bytes(), num_threads);
    std::vector<Collected> lists;
    if (!collect_candidates(x, limit, k, threads, lists)) return std::nullopt;
    int64_t total = 0;
    for (const Collected& list : lists) total += list.count;
    if (total < k) return std::nullopt;
    if (threads == 1) return Candidates{std::move(lists[0].data), total, limit};
    std::unique_ptr<Candidate[]> joined(new Candidate[static_cast<size_t>(total)]);
    int64_t at = 0;
    for (const Collected& list : lists) {
        std::memcpy(joined.get() + at, list.data.get(), static_cast<size_t>(list.count) * sizeof(Candidate));
        at += list.count;
    }
    return Candidates{std::move(joined), total, limit};
}

std::optional<Candidates> find_candidates(const Buffer& x, int64_t k, const float* earlier, int num_threads) {
    if (x.count < kLeastSampled || k > x.count / 4) return std::nullopt;
    if (earlier != nullptr && *earlier > 0.0f && std::isfinite(*earlier)) {
        auto found = candidates_above(x, kThresholdHint * *earlier, k, num_threads);
        if (found) return found;
    }
    return candidates_above(x, sample_limit(x, k), k, num_threads);
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
            if (found) return select_from(found->data.get(), found->count, found->limit, k, values, indices);
            return bits_float(select_all<FloatKeys, float>(x, k, values, indices));
        }
    }
}

}  // namespace

float limit_of_sample(const float* sample, int64_t size, int64_t count, int64_t wanted) {
    double expected = static_cast<double>(size) * static_cast<double>(wanted) / static_cast<double>(count);
    // Four standard deviations of slack: one miss in 30,000 on independent data.
    auto rank = static_cast<int64_t>(expected + 4.0 * std::sqrt(expected) + 4.0);
    if (rank >= size) return 0.0f;
    uint32_t key = KthLargest<FloatKeys>(rank + 1, 0, FloatKeys::kMost).of(sample, size, FloatKeys::kMost).key;
    return bits_float(std::min(key, kInfKey));
}

float select_from(const Candidate* candidates, int64_t num_candidates, float limit, int64_t k, const Buffer& values,
                  int32_t* indices) {
    constexpr uint32_t kOctave = 1u << 23;
    const uint32_t least = float_bits(limit);
    auto threshold =
        KthLargest<CandidateKeys>(k, least, CandidateKeys::kMost).of(candidates, num_candidates, least + 3 * kOctave);
    for_selected<CandidateKeys>(candidates, k, threshold, [&](int64_t i, int64_t place) {
        auto index = static_cast<int32_t>(candidates[i].index);
        std::memcpy(values.bytes() + 4 * place, &candidates[i].bits, 4);
        std::memcpy(indices + place, &index, 4);
    });
    return bits_float(threshold.key);
}

void topk(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices, float* threshold, int num_threads) {
    float magnitude = select(x, k, values, indices, threshold, num_threads);
    if (threshold != nullptr) *threshold = magnitude;
}

}  // namespace pycomm
