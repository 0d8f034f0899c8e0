#include "kernels/step.h"

#include <cmath>

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/loops/loops.h"

namespace pycomm {
namespace {

char* element_or_null(const std::vector<Buffer>& arrays, size_t j, int64_t i) {
    return arrays.empty() ? nullptr : const_cast<char*>(element_of(arrays[j], i));
}

int64_t bytes_of(const std::vector<Buffer>& arrays) {
    int64_t num_bytes = 0;
    for (const Buffer& array : arrays) num_bytes += array.num_bytes();
    return num_bytes;
}

// Adds 1 to the counts of steps where the rule does, and returns the coefficients of each parameter.
std::vector<Coefficients> counted(const Step& job) {
    std::vector<Coefficients> each(job.counts.size(), job.coefficients);
    for (size_t j = 0; j < each.size(); ++j) {
        auto* count = static_cast<float*>(job.counts[j].data);
        if (counts_steps(job.rule)) *count += 1.0f;
        auto [inverse1, inverse_sqrt2] =
            bias_corrections(job.coefficients, *count, [](double x) { return std::sqrt(x); });
        each[j].inverse_bias_correction1 = inverse1;
        each[j].inverse_sqrt_bias_correction2 = inverse_sqrt2;
    }
    return each;
}

// The same elements of parameter j in the memory of several processes.
std::vector<void*> elements_of(const std::vector<std::vector<Buffer>>& processes, size_t j, int64_t i) {
    std::vector<void*> out;
    for (const std::vector<Buffer>& arrays : processes) out.push_back(element_or_null(arrays, j, i));
    return out;
}

}  // namespace

void step(const Step& job, double scale, int num_threads) {
    if (job.weights.empty() || (job.found != nullptr && *job.found != 0.0f)) return;
    const std::vector<Coefficients> each = counted(job);
    Blocks blocks(job.weights);
    std::vector<double> sums(job.squares == nullptr ? 0 : 2 * static_cast<size_t>(blocks.count()), 0.0);
    int threads = useful_threads(4 * bytes_of(job.weights), num_threads);
    const Store store = bytes_of(job.weights) >= kStreamingBytes ? Store::kStreaming : Store::kCached;
    blocks.for_each(threads, [&](size_t j, Range part, int64_t block) {
        const std::vector<void*> mirrors = elements_of(job.mirrors, j, part.begin);
        StepTerms terms{.rule = job.rule,
                        .coefficients = each.empty() ? &job.coefficients : &each[j],
                        .scale = scale,
                        .rate = job.rates == nullptr ? 1.0 : job.rates[j],
                        .weight = element_or_null(job.weights, j, part.begin),
                        .grad = element_or_null(job.grads, j, part.begin),
                        .copy = element_or_null(job.copies, j, part.begin),
                        .states = {},
                        .dtype = job.weights[j].dtype,
                        .grad_dtype = job.grads.empty() ? DType::kF32 : job.grads[j].dtype,
                        .copy_dtype = job.copies.empty() ? DType::kF32 : job.copies[j].dtype,
                        .count = part.size(),
                        .squares = sums.empty() ? nullptr : &sums[2 * static_cast<size_t>(block)],
                        .mirrors = mirrors.data(),
                        .num_mirrors = writes_weights(job.rule) ? static_cast<int>(mirrors.size()) : 0,
                        .mirror_store = store};
        for (int s = 0; s < kMostStates; ++s) terms.states[s] = element_or_null(job.states[s], j, part.begin);
        loops().step(terms);
    });
    if (job.squares == nullptr) return;
    blocks.add_up(sums.data(), 2, job.squares);
    blocks.add_up(sums.data() + 1, 2, job.squares + 1);
}

}  // namespace pycomm
