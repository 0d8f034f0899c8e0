// sparsify: accumulate.h, then the k sums of largest magnitude of every gradient, exactly.
//
// indices are positions in acc, ascending, gradient by gradient; values[m] = acc[indices[m]]. Each gradient's entries
// are selected from its part of acc as in topk.h. counts[j] is the k of gradient j: 0 <= counts[j] <= its size; acc
// holds at most 2^31 - 1 elements.
//
// thresholds[j] is the smallest selected magnitude of an earlier similar step; a number that is not positive and finite
// stands for none. The sums that exceed kThresholdHint of it are collected in the pass that computes them, and the
// selection reads only these. Where there is none, the CPU computes a sample of the sums first, a sixteenth of them at
// most, and takes a limit from these; a GPU reads acc once more. If fewer than k were collected, or more than there is
// room for, topk reads acc once more, and missed[j] is set if there was a threshold. The result does not depend on the
// threshold. thresholds[j] is set to this step's, where counts[j] > 0.
//
// An output overlaps no other array of the call.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/accumulate.h"

namespace pycomm {

struct Selection {
    std::vector<int64_t> counts;
    Buffer values;  // acc's type, as many as all counts together
    int32_t* indices = nullptr;
    float* thresholds = nullptr;
    bool* missed = nullptr;         // false too where there was no threshold to try
    int32_t* num_missed = nullptr;  // out: grows by the number of missed ones; null: not counted
    float* largest = nullptr;       // out: the largest magnitude of all values, if they are float32; null: not needed
};

void sparsify(const Accumulation& job, double scale, const Selection& selection, bool* finite, int num_threads);

namespace cuda {

int64_t sparsify_workspace_bytes(const Accumulation& job, const Selection& selection);
// thresholds, missed and finite lie on the device.
void sparsify(const Accumulation& job, Scale scale, const Selection& selection, bool* finite, Workspace& workspace,
              Stream stream);

}  // namespace cuda
}  // namespace pycomm
