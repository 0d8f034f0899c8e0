// Selection among collected candidates, which topk and sparsify share.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "kernels/cpu/loops/loops.h"

namespace pycomm {

// Writes the k candidates with the largest keys, in the order of the list, which is by index. Returns the k-th largest
// magnitude.
float select_from(const Candidate* candidates, int64_t num_candidates, int64_t k, const Buffer& values,
                  int32_t* indices);

}  // namespace pycomm
