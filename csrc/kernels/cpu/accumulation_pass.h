// The pass that accumulate and what takes a part of the sums share: over all elements of a bucket, cut over threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/parallel.h"
#include "kernels/accumulate.h"
#include "kernels/cpu/loops/loops.h"

namespace pycomm {

class AccumulationPass {
   public:
    AccumulationPass(const Accumulation& job, double scale, int num_threads);

    // Positions of the gradients in the flat arrays, and the end of the last one.
    const std::vector<int64_t>& offsets() const { return offsets_; }
    int num_threads() const { return threads_; }
    // Elements of the flat arrays that are this thread's.
    Range range_of(int thread) const { return piece_of(job_.acc.count, thread, threads_, 64); }
    // Computes the sums of this thread's part of elements `part`.
    void sum_range(int thread, Range part, uint8_t* infinite) const;

    // Computes the sums of elements `part` of the flat arrays, all of gradient j. The collector, if it is not null,
    // gets those that exceed its limit. Returns whether all sums are finite.
    bool sum(size_t j, Range part, Collector* collector) const;

    // The same, with the sums in `acc`, which has acc's type.
    bool sum_into(size_t j, Range part, void* acc) const;
    // Writes elements `part` of acc from what sum_into() left.
    void store(Range part, const void* acc) const;

    // Computes the sums of this thread's part of elements `part`, all float32, `step` after the other: calls
    // take(range, sums), which may change the sums, and writes them to acc if that `keeps` them.
    void sum_steps(int thread, Range part, int64_t step, bool keeps, uint8_t* infinite,
                   const std::function<void(Range, float*)>& take) const;

    // The same sums, of float32, into `acc` alone; `velocity` is for scratch.
    void preview(size_t j, Range part, float* acc, float* velocity) const;

    // Calls sum_part(thread, j, part), which returns what sum() does, for every thread's parts of every gradient, and
    // writes finite[j].
    void run(bool* finite, const std::function<bool(int, size_t, Range)>& sum_part) const;

    // Calls take(thread, infinite) for every thread, which sets infinite[j] to 1 where a sum of gradient j is not
    // finite, and writes finite[j].
    void run_threads(bool* finite, const std::function<void(int, uint8_t*)>& take) const;

   private:
    Terms terms_of(size_t j, Range part) const;

    const Accumulation& job_;
    const double scale_;
    const std::vector<float> factors_;  // one for each gradient, or none
    const std::vector<int64_t> offsets_;
    const Store store_;
    const int threads_;
};

}  // namespace pycomm
