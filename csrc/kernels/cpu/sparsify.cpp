#include "kernels/sparsify.h"

#include <cmath>
#include <cstring>
#include <memory>

#include "base/half.h"
#include "base/parallel.h"
#include "kernels/cpu/loops/loops.h"
#include "kernels/cpu/pieces.h"
#include "kernels/cpu/selection.h"
#include "kernels/topk.h"

namespace pycomm {
namespace {

// What one thread collected of one gradient.
struct Found {
    size_t gradient;
    int64_t begin, count;  // in the thread's list; -1: it ran full
};

struct Candidates {
    std::unique_ptr<Candidate[]> list;
    int64_t used = 0;
    std::vector<Found> found;
};

class Pass {
   public:
    Pass(const Accumulation& job, double scale, const Selection* selection, bool* finite)
        : job_(job), scale_(scale), selection_(selection), finite_(finite), offsets_(offsets_of(job.grads)) {
        int64_t out_bytes = job.acc.num_bytes() * (job.velocity == nullptr ? 1 : 2);
        store_ = out_bytes >= kStreamingBytes ? Store::kStreaming : Store::kCached;
    }

    // The sums, and the candidates for those gradients that have a threshold to go by.
    void run(int num_threads) {
        int64_t traffic = job_.acc.num_bytes() * (job_.velocity == nullptr ? 2 : 4);
        int threads = useful_threads(traffic, num_threads);
        std::vector<uint8_t> infinite(job_.grads.size() * static_cast<size_t>(threads), 0);
        candidates_.resize(static_cast<size_t>(threads));
        parallel_for(threads, threads, [&](int thread) {
            Candidates& candidates = candidates_[static_cast<size_t>(thread)];
            uint8_t* bad = infinite.data() + job_.grads.size() * static_cast<size_t>(thread);
            Range mine = piece_of(job_.acc.count, thread, threads, 64);
            if (int64_t capacity = capacity_for(mine); capacity > 0) {
                candidates.list.reset(new Candidate[static_cast<size_t>(capacity)]);
            }
            for_pieces_of(offsets_, mine, [&](size_t j, Range part) {
                if (!(is_warm(j) ? collect(j, part, candidates) : sum(j, part, nullptr))) bad[j] = 1;
            });
        });
        for (size_t j = 0; j < job_.grads.size(); ++j) {
            finite_[j] = true;
            for (int thread = 0; thread < threads; ++thread) {
                if (infinite[job_.grads.size() * static_cast<size_t>(thread) + j] != 0) finite_[j] = false;
            }
        }
    }

    void select(int num_threads) {
        std::vector<int64_t> starts(job_.grads.size() + 1, 0);
        for (size_t j = 0; j < job_.grads.size(); ++j) starts[j + 1] = starts[j] + selection_->counts[j];
        int threads = useful_threads(job_.acc.num_bytes(), num_threads);
        parallel_for(static_cast<int>(job_.grads.size()), threads, [&](int gradient) {
            auto j = static_cast<size_t>(gradient);
            select_one(j, starts[j]);
        });
    }

   private:
    bool is_warm(size_t j) const {
        if (selection_ == nullptr || job_.acc.dtype != DType::kF32) return false;
        int64_t k = selection_->counts[j];
        if (k == 0 || k > job_.grads[j].count / 2) return false;
        float threshold = selection_->thresholds[j];
        return threshold > 0.0f && std::isfinite(threshold);
    }

    // Room for twice what is wanted, in equal shares along the gradient, and for some clustering.
    int64_t room_for(size_t j, int64_t num_elements) const {
        double share = static_cast<double>(num_elements) / static_cast<double>(job_.grads[j].count);
        auto wanted = static_cast<int64_t>(2.0 * share * static_cast<double>(selection_->counts[j]));
        return std::min(num_elements, wanted + num_elements / 128 + 64);
    }

    int64_t capacity_for(Range mine) const {
        int64_t capacity = 0;
        for_pieces_of(offsets_, mine, [&](size_t j, Range part) {
            if (is_warm(j)) capacity += room_for(j, part.size());
        });
        return capacity;
    }

    char* acc_at(int64_t i) const { return job_.acc.bytes() + i * size_of(job_.acc.dtype); }

    // Elements `part` of the flat arrays, all of them gradient j's.
    bool sum(size_t j, Range part, Collector* collector) const {
        const int64_t wide = size_of(job_.acc.dtype) * part.begin, from = part.begin - offsets_[j];
        auto at = [&](const void* flat) {
            return flat == nullptr ? nullptr : const_cast<char*>(static_cast<const char*>(flat)) + wide;
        };
        double scale = job_.factors == nullptr ? scale_ : scale_ * static_cast<double>(job_.factors[j]);
        Terms terms{.grad = element_of(job_.grads[j], from),
                    .weight = job_.weights.empty() ? nullptr : element_of(job_.weights[j], from),
                    .residual = at(job_.residual),
                    .old_velocity = at(job_.old_velocity),
                    .acc = acc_at(part.begin),
                    .velocity = at(job_.velocity),
                    .dtype = job_.acc.dtype,
                    .grad_dtype = job_.grads[j].dtype,
                    .count = part.size(),
                    .scale = scale,
                    .decay = job_.decay,
                    .momentum = job_.momentum,
                    .nesterov = job_.nesterov};
        return loops().accumulate(terms, store_, collector);
    }

    // As `sum`, and what exceeds the earlier threshold becomes a candidate.
    bool collect(size_t j, Range part, Candidates& candidates) const {
        Collector collector{.limit = 0.98f * selection_->thresholds[j],
                            .first_index = static_cast<uint32_t>(part.begin - offsets_[j]),
                            .list = candidates.list.get() + candidates.used,
                            .capacity = room_for(j, part.size()),
                            .count = 0,
                            .full = false};
        bool finite = sum(j, part, &collector);
        candidates.found.push_back({j, candidates.used, collector.full ? -1 : collector.count});
        candidates.used += collector.count;
        return finite;
    }

    void select_one(size_t j, int64_t start) const {
        const int64_t k = selection_->counts[j];
        selection_->missed[j] = false;
        if (k == 0) return;
        Buffer x{acc_at(offsets_[j]), job_.grads[j].count, job_.acc.dtype};
        Buffer values{selection_->values.bytes() + start * size_of(x.dtype), k, x.dtype};
        int32_t* indices = selection_->indices + start;
        if (is_warm(j)) {
            std::vector<Candidate> joined;
            if (join(j, joined) && static_cast<int64_t>(joined.size()) >= k) {
                selection_->thresholds[j] =
                    select_from(joined.data(), static_cast<int64_t>(joined.size()), x, k, values, indices);
            } else {
                selection_->missed[j] = true;
                selection_->thresholds[j] = 0.0f;
            }
        }
        if (!is_warm(j)) topk(x, k, values, indices, &selection_->thresholds[j], 1);
        for (int64_t m = 0; m < k; ++m) indices[m] += static_cast<int32_t>(offsets_[j]);
    }

    // All candidates of gradient j in order; false if some had no room.
    bool join(size_t j, std::vector<Candidate>& joined) const {
        for (const Candidates& candidates : candidates_) {
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
    const double scale_;
    const Selection* const selection_;
    bool* const finite_;
    const std::vector<int64_t> offsets_;
    Store store_;
    std::vector<Candidates> candidates_;
};

}  // namespace

void accumulate(const Accumulation& job, double scale, bool* finite, int num_threads) {
    Pass(job, scale, nullptr, finite).run(num_threads);
}

void sparsify(const Accumulation& job, double scale, const Selection& selection, bool* finite, int num_threads) {
    Pass pass(job, scale, &selection, finite);
    pass.run(num_threads);
    pass.select(num_threads);
}

}  // namespace pycomm
