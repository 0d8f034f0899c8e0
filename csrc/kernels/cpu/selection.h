// Selection among collected candidates, which topk and sparsify share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/buffer.h"
#include "kernels/cpu/loops/loops.h"

namespace pycomm {

// Keys order magnitudes of floats as unsigned integers. This is the key of inf; all NaNs share the key above it.
inline constexpr uint32_t kInfKey = 0x7f800000u;

// Of fewer elements, all are looked at: sampling would cost more than it saves.
inline constexpr int64_t kLeastSampled = 8192;
inline constexpr int64_t kSampleRun = 32;  // neighbors that are sampled together: two cache lines

// Where a sample is taken from `count` >= kLeastSampled elements: at fixed places, a sixteenth of them at most.
struct SamplePlan {
    int64_t num_runs, apart;
    explicit SamplePlan(int64_t count)
        : num_runs(std::min<int64_t>(512, count / (16 * kSampleRun))), apart((count - kSampleRun) / num_runs) {}
    int64_t size() const { return num_runs * kSampleRun; }
};

// A magnitude that `wanted` of `count` elements exceed, and not many more, by a sample of them. 0: there is none.
float limit_of_sample(const float* sample, int64_t size, int64_t count, int64_t wanted);

// Room for the candidates of `num_elements` elements that have `wanted` of the largest, if a limit is near theirs. Few
// elements may all be candidates.
inline int64_t room_for_candidates(int64_t num_elements, int64_t wanted) {
    return std::min(num_elements, 2 * wanted + num_elements / 64 + 64) + kCollectSlack;
}

// Writes the k candidates with the largest keys, in the order of the list, which is by index. All exceed `limit` in
// magnitude. Returns the k-th largest magnitude.
float select_from(const Candidate* candidates, int64_t num_candidates, float limit, int64_t k, const Buffer& values,
                  int32_t* indices);

}  // namespace pycomm
