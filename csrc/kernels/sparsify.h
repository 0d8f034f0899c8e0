// sparsify: accumulate.h, and of the sums of every gradient the k of largest magnitude, exactly.
//
// indices are positions in acc, ascending, gradient by gradient; values[m] = acc[indices[m]]. What is selected is what
// topk.h selects from each gradient's part of acc. counts[j] says how many of gradient j: 0 <= counts[j] <= its size;
// acc holds at most 2^31 - 1 elements.
//
// thresholds[j] holds the magnitude of the last one selected at an earlier similar step, or nothing positive and finite
// for none. Then what exceeds 0.98 of it is collected in the very pass that makes the sums, and selection reads no more
// than that. When fewer than k were collected, or more than there is room for, missed[j] says so and topk looks through
// acc once more. The result does not depend on it. thresholds[j] is left with this step's, where counts[j] > 0.
// What is written overlaps nothing else of the call.
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
    bool* missed = nullptr;  // false too where there was no threshold to try
};

void sparsify(const Accumulation& job, double scale, const Selection& selection, bool* finite, int num_threads);

namespace cuda {

int64_t sparsify_workspace_bytes(const Accumulation& job, const Selection& selection);
// thresholds, missed and finite lie on the device.
void sparsify(const Accumulation& job, Scale scale, const Selection& selection, bool* finite, Workspace& workspace,
              Stream stream);

}  // namespace cuda
}  // namespace pycomm
