#include "kernels/sparsify.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "kernels/absmax.h"
#include "kernels/cpu/accumulation_pass.h"
#include "kernels/cpu/pieces.h"
#include "kernels/cpu/selection.h"
#include "kernels/topk.h"

namespace pycomm {
namespace {

// Candidates that one thread collected from one gradient.
struct Found {
    size_t gradient;
    int64_t begin, count;  // in the thread's list; -1: it ran full
};

struct ThreadCandidates {
    std::unique_ptr<Candidate[]> list;
    int64_t used = 0;
    std::vector<Found> found;
};

class Sparsification {
   public:
    Sparsification(const Accumulation& job, double scale, const Selection& selection, int num_threads)
        : job_(job),
          selection_(selection),
          pass_(job, scale, num_threads),
          offsets_(pass_.offsets()),
          limits_(job.grads.size(), 0.0f),
          candidates_(static_cast<size_t>(pass_.num_threads())) {}

    // Computes the sums, and collects candidates for those gradients that have a limit.
    void sum(bool* finite) {
        parallel_for(static_cast<int>(limits_.size()), pass_.num_threads(), [&](int gradient) {
            auto j = static_cast<size_t>(gradient);
            limits_[j] = is_warm(j) ? kThresholdHint * selection_.thresholds[j] : sample_limit(j);
        });
        for (int thread = 0; thread < pass_.num_threads(); ++thread) {
            int64_t capacity = capacity_for(pass_.range_of(thread));
            if (capacity == 0) continue;
            candidates_[static_cast<size_t>(thread)].list.reset(new Candidate[static_cast<size_t>(capacity)]);
        }
        pass_.run(finite, [&](int thread, size_t j, Range part) {
            if (limits_[j] == 0.0f) return pass_.sum(j, part, nullptr);
            return collect(j, part, candidates_[static_cast<size_t>(thread)]);
        });
    }

    void select(int num_threads) {
        std::vector<int64_t> starts(job_.grads.size() + 1, 0);
        for (size_t j = 0; j < job_.grads.size(); ++j) starts[j + 1] = starts[j] + selection_.counts[j];
        int threads = useful_threads(job_.acc.num_bytes(), num_threads);
        parallel_for(static_cast<int>(job_.grads.size()), threads, [&](int gradient) {
            auto j = static_cast<size_t>(gradient);
            select_one(j, starts[j]);
        });
    }

   private:
    bool may_collect(size_t j) const {
        int64_t k = selection_.counts[j];
        return job_.acc.dtype == DType::kF32 && k > 0 && k <= job_.grads[j].count / 2;
    }

    bool is_warm(size_t j) const {
        float threshold = selection_.thresholds[j];
        return may_collect(j) && threshold > 0.0f && std::isfinite(threshold);
    }

    // A limit from a sample of the sums, which is computed twice; 0: none.
    float sample_limit(size_t j) const {
        const int64_t count = job_.grads[j].count;
        if (!may_collect(j) || count < kLeastSampled) return 0.0f;
        const SamplePlan plan(count);
        std::vector<float> sample(static_cast<size_t>(plan.size()));
        float velocity[kSampleRun];
        for (int64_t run = 0; run < plan.num_runs; ++run) {
            int64_t begin = offsets_[j] + run * plan.apart;
            pass_.preview(j, {begin, begin + kSampleRun}, sample.data() + run * kSampleRun, velocity);
        }
        float limit = limit_of_sample(sample.data(), plan.size(), count, selection_.counts[j]);
        return std::isfinite(limit) ? limit : 0.0f;
    }

    // Room for this part's share of the gradient's count, if that is spread evenly, and for some clustering.
    int64_t room_for(size_t j, int64_t num_elements) const {
        double share = static_cast<double>(num_elements) / static_cast<double>(job_.grads[j].count);
        return room_for_candidates(num_elements,
                                   static_cast<int64_t>(share * static_cast<double>(selection_.counts[j])));
    }

    int64_t capacity_for(Range mine) const {
        int64_t capacity = 0;
        for_pieces_of(offsets_, mine, [&](size_t j, Range part) {
            if (limits_[j] != 0.0f) capacity += room_for(j, part.size());
        });
        return capacity;
    }

    char* acc_at(int64_t i) const { return job_.acc.bytes() + i * size_of(job_.acc.dtype); }

    // Computes the sums of `part`; those that exceed the limit become candidates.
    bool collect(size_t j, Range part, ThreadCandidates& candidates) const {
        Collector collector{.limit = limits_[j],
                            .first_index = static_cast<uint32_t>(part.begin - offsets_[j]),
                            .list = candidates.list.get() + candidates.used,
                            .capacity = room_for(j, part.size()),
                            .count = 0,
                            .full = false};
        bool finite = pass_.sum(j, part, &collector);
        candidates.found.push_back({j, candidates.used, collector.full ? -1 : collector.count});
        candidates.used += collector.count;
        return finite;
    }

    void select_one(size_t j, int64_t start) const {
        const int64_t k = selection_.counts[j];
        selection_.missed[j] = false;
        if (k == 0) return;
        Buffer x{acc_at(offsets_[j]), job_.grads[j].count, job_.acc.dtype};
        Buffer values{selection_.values.bytes() + start * size_of(x.dtype), k, x.dtype};
        int32_t* indices = selection_.indices + start;
        std::vector<Candidate> joined;
        if (limits_[j] != 0.0f && join(j, joined) && static_cast<int64_t>(joined.size()) >= k) {
            selection_.thresholds[j] =
                select_from(joined.data(), static_cast<int64_t>(joined.size()), limits_[j], k, values, indices);
        } else {
            selection_.missed[j] = is_warm(j);
            selection_.thresholds[j] = 0.0f;
            topk(x, k, values, indices, &selection_.thresholds[j], 1);
        }
        for (int64_t m = 0; m < k; ++m) indices[m] += static_cast<int32_t>(offsets_[j]);
    }

    // All candidates of gradient j in order; false if some had no room.
    bool join(size_t j, std::vector<Candidate>& joined) const {
        for (const ThreadCandidates& candidates : candidates_) {
            for (const Found& part : candidates.found) {
                if (part.gradient != j) continue;
                if (part.count < 0) return false;
                const Candidate* from = candidates.list.get() + part.begin;
                joined.insert(joined.end(), from, from + part.count);
            }
        }
        return true;
    }

    const Accumulation& job_;
    const Selection& selection_;
    const AccumulationPass pass_;
    const std::vector<int64_t>& offsets_;
    std::vector<float> limits_;                 // what candidates of each gradient exceed; 0: none are collected
    std::vector<ThreadCandidates> candidates_;  // by thread
};

}  // namespace

void sparsify(const Accumulation& job, double scale, const Selection& selection, bool* finite, int num_threads) {
    Sparsification sparsification(job, scale, selection, num_threads);
    sparsification.sum(finite);
    sparsification.select(num_threads);
    if (selection.num_missed != nullptr) {
        *selection.num_missed +=
            static_cast<int32_t>(std::count(selection.missed, selection.missed + selection.counts.size(), true));
    }
    if (selection.largest == nullptr) return;
    *selection.largest = absmax({selection.values}, num_threads);
}

}  // namespace pycomm
