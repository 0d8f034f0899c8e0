#include "kernels/accumulate.h"

#include <cmath>

#include "kernels/cpu/accumulation_pass.h"
#include "kernels/cpu/pieces.h"
#include "kernels/norms.h"

namespace pycomm {
namespace {

Store store_of(const Accumulation& job) {
    int64_t out_bytes = job.acc.num_bytes() * (job.velocity == nullptr ? 1 : 2);
    return out_bytes >= kStreamingBytes ? Store::kStreaming : Store::kCached;
}

// Factors that bring each gradient's norm down to the limit.
std::vector<float> factors_of(const Accumulation& job, double scale, int num_threads) {
    std::vector<float> factors;
    if (job.clip == 0.0) return factors;
    std::vector<double> squares(job.grads.size());
    norms(job.grads, squares.data(), num_threads);
    for (double square : squares) {
        double factor = job.clip / (std::fabs(scale) * std::sqrt(square));
        factors.push_back(factor < 1.0 ? static_cast<float>(factor) : 1.0f);  // 1 for NaN, which the sums keep
    }
    return factors;
}

int64_t traffic_of(const Accumulation& job) { return job.acc.num_bytes() * (job.velocity == nullptr ? 2 : 4); }

}  // namespace

AccumulationPass::AccumulationPass(const Accumulation& job, double scale, int num_threads)
    : job_(job),
      scale_(scale),
      factors_(factors_of(job, scale, num_threads)),
      offsets_(offsets_of(job.grads)),
      store_(store_of(job)),
      threads_(useful_threads(traffic_of(job), num_threads)) {}

Terms AccumulationPass::terms_of(size_t j, Range part) const {
    const int64_t wide = size_of(job_.acc.dtype) * part.begin, from = part.begin - offsets_[j];
    auto at = [&](const void* flat) {
        return flat == nullptr ? nullptr : const_cast<char*>(static_cast<const char*>(flat)) + wide;
    };
    double scale = factors_.empty() ? scale_ : scale_ * static_cast<double>(factors_[j]);
    return {.grad = element_of(job_.grads[j], from),
            .weight = job_.weights.empty() ? nullptr : element_of(job_.weights[j], from),
            .residual = at(job_.residual),
            .old_velocity = at(job_.old_velocity),
            .acc = at(job_.acc.data),
            .velocity = at(job_.velocity),
            .dtype = job_.acc.dtype,
            .grad_dtype = job_.grads[j].dtype,
            .count = part.size(),
            .scale = scale,
            .decay = job_.decay,
            .momentum = job_.momentum,
            .nesterov = job_.nesterov};
}

bool AccumulationPass::sum(size_t j, Range part, Collector* collector) const {
    return loops().accumulate(terms_of(j, part), store_, collector);
}

void AccumulationPass::preview(size_t j, Range part, float* acc, float* velocity) const {
    Terms terms = terms_of(j, part);
    terms.acc = acc;
    terms.velocity = terms.velocity == nullptr ? nullptr : velocity;
    loops().accumulate(terms, Store::kCached, nullptr);
}

void AccumulationPass::run(bool* finite, const std::function<bool(int, size_t, Range)>& sum_part) const {
    const size_t num_grads = job_.grads.size();
    std::vector<uint8_t> infinite(num_grads * static_cast<size_t>(threads_), 0);
    parallel_for(threads_, threads_, [&](int thread) {
        uint8_t* bad = infinite.data() + num_grads * static_cast<size_t>(thread);
        for_pieces_of(offsets_, range_of(thread), [&](size_t j, Range part) {
            if (!sum_part(thread, j, part)) bad[j] = 1;
        });
    });
    for (size_t j = 0; j < num_grads; ++j) {
        finite[j] = true;
        for (size_t at = j; at < infinite.size(); at += num_grads) {
            if (infinite[at] != 0) finite[j] = false;
        }
    }
}

void accumulate(const Accumulation& job, double scale, bool* finite, int num_threads) {
    AccumulationPass pass(job, scale, num_threads);
    pass.run(finite, [&](int, size_t j, Range part) { return pass.sum(j, part, nullptr); });
}

}  // namespace pycomm
