// The pass over a bucket that accumulate and sparsify share.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/accumulate.h"
#include "kernels/cuda/bits.h"
#include "kernels/cuda/host.h"
#include "kernels/cuda/norms_pass.h"
#include "kernels/cuda/table.h"

namespace pycomm::cuda {

// Bits of the sums that exceed kThresholdHint of their gradient's threshold, where that is positive and finite. For
// float32.
struct Marks {
    uint32_t* words = nullptr;  // bit i % 32 of word i / 32 is element i - shift_of(acc); null: no marks
    const float* thresholds = nullptr;
};

// Number of elements from a border of 16 bytes to acc. The pass counts from there.
inline int64_t shift_of(const Buffer& acc) {
    auto address = reinterpret_cast<uintptr_t>(acc.data);
    auto size = static_cast<uintptr_t>(size_of(acc.dtype));
    return address % size == 0 ? static_cast<int64_t>(address % 16 / size) : 0;
}

// Number of words, enough for any shift.
inline int64_t words_of_marks(int64_t count) { return (count / kChunkElems + 2) * kChunkWords; }

// The arrays at the beginning of a bucket's table.
inline std::vector<Buffer> arrays_of(const Accumulation& job) {
    std::vector<Buffer> arrays = job.grads;
    arrays.insert(arrays.end(), job.weights.begin(), job.weights.end());
    return arrays;
}

// Answers for each gradient: `answers[j]` becomes `when_not_finite` if one of its sums is not finite, and else stays.
struct Findings {
    bool* answers;
    bool when_not_finite;
    Zeros zeros = {};          // set to 0 for the next kernel
    float* largest = nullptr;  // likewise; null: nothing to set
};

// Scratch memory of a pass with `clip`.
inline int64_t clipping_bytes(const Accumulation& job) {
    if (job.clip == 0.0) return 0;
    return round_up(static_cast<int64_t>(job.grads.size() * sizeof(float))) + slot_bytes<1>(job.grads);
}

// `entries`: of arrays_of(job), in memory of the device. With `clip`, `counter` is 0 there, and `scratch` has
// clipping_bytes().
void accumulate_pass(const Accumulation& job, const Entry* entries, Scale scale, Findings findings, Marks marks,
                     uint32_t* counter, char* scratch, Stream stream);

}  // namespace pycomm::cuda
