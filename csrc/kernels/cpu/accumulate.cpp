#include "kernels/accumulate.h"

#include <algorithm>
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

bool AccumulationPass::sum_into(size_t j, Range part, void* acc) const {
    Terms terms = terms_of(j, part);
    terms.acc = acc;
    return loops().accumulate(terms, Store::kCached, nullptr);
}

void AccumulationPass::store(Range part, const void* acc) const {
    const int64_t size = size_of(job_.acc.dtype);
    loops().copy(acc, job_.acc.bytes() + part.begin * size, part.size() * size, store_);
}

void AccumulationPass::sum_range(int thread, Range part, uint8_t* infinite) const {
    const Range mine = piece_of(part.size(), thread, threads_, 64);
    for_pieces_of(offsets_, {part.begin + mine.begin, part.begin + mine.end}, [&](size_t j, Range piece) {
        if (!sum(j, piece, nullptr)) infinite[j] = 1;
    });
}

void AccumulationPass::sum_steps(int thread, Range part, int64_t step, bool keeps, uint8_t* infinite,
                                 const std::function<void(Range, float*)>& take) const {
    const Range mine = piece_of(part.size(), thread, threads_, step);
    std::vector<float> sums(static_cast<size_t>(std::min(step, mine.size())));
    for (int64_t at = mine.begin; at < mine.end; at += step) {
        const Range range{at, std::min(at + step, mine.end)};
        const Range flat{part.begin + range.begin, part.begin + range.end};
        for_pieces_of(offsets_, flat, [&](size_t j, Range piece) {
            if (!sum_into(j, piece, sums.data() + (piece.begin - flat.begin))) infinite[j] = 1;
        });
        take(range, sums.data());
        if (keeps) store(flat, sums.data());
    }
}

void AccumulationPass::preview(size_t j, Range part, float* acc, float* velocity) const {
    Terms terms = terms_of(j, part);
    terms.acc = acc;
    terms.velocity = terms.velocity == nullptr ? nullptr : velocity;
    loops().accumulate(terms, Store::kCached, nullptr);
}

void AccumulationPass::run(bool* finite, const std::function<bool(int, size_t, Range)>& sum_part) const {
    run_threads(finite, [&](int thread, uint8_t* infinite) {
        for_pieces_of(offsets_, range_of(thread), [&](size_t j, Range part) {
            if (!sum_part(thread, j, part)) infinite[j] = 1;
        });
    });
}

void AccumulationPass::run_threads(bool* finite, const std::function<void(int, uint8_t*)>& take) const {
    const size_t num_grads = job_.grads.size();
    std::vector<uint8_t> infinite(num_grads * static_cast<size_t>(threads_), 0);
    parallel_for(threads_, threads_,
                 [&](int thread) { take(thread, infinite.data() + num_grads * static_cast<size_t>(thread)); });
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
