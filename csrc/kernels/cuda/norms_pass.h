// Factors that bring gradients' norms down to a limit; a part of accumulate.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/sums.h"

namespace pycomm::cuda {

// Scratch memory, behind a table.
struct Clipping {
    double limit;       // of a norm times the scale
    uint32_t* counter;  // 0 before the kernel starts
    float* factors;     // out: one for each array
    Sums<1>* slots;
};

// One launch: the block that comes last adds up.
void clip_pass(const Table& table, Scale scale, const Clipping& clipping, Stream stream);

}  // namespace pycomm::cuda
