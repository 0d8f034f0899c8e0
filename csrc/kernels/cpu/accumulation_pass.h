// The pass that accumulate and sparsify share: over all elements of a bucket, cut over threads.
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

    // Computes the sums of elements `part` of the flat arrays, all of gradient j. The collector, if it is not null,
    // gets those that exceed its limit. Returns whether all sums are finite.
    bool sum(size_t j, Range part, Collector* collector) const;

    // The same sums, of float32, into `acc` alone; `velocity` is for scratch.
    void preview(size_t j, Range part, float* acc, float* velocity) const;

    // Calls sum_part(thread, j, part), which returns what sum() does, for every thread's parts of every gradient, and
    // writes finite[j].
    void run(bool* finite, const std::function<bool(int, size_t, Range)>& sum_part) const;

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
