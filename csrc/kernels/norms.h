// norms: sums the squares of the elements of each of many arrays, in double. A sum is finite exactly where all elements
// are (float64 elements beyond 1e154 in magnitude count as infinite, as their squares are).
//
// The arrays may be of any floating types, in any mixture; an empty one gives 0. On the CPU the order of the additions
// is fixed (32 interleaved sums, over blocks of kNormBlock elements from the array's beginning, see cpu/blocks.h),
// so every instruction set and number of threads gives the same bits. On a GPU the order is another fixed one. An
// output overlaps no other array of the call.
#pragma once

#include <vector>

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm {

void norms(const std::vector<Buffer>& arrays, double* squares, int num_threads);

namespace cuda {

int64_t norms_workspace_bytes(const std::vector<Buffer>& arrays);
// Writes squares[j] for arrays[j], on the device.
void norms(const std::vector<Buffer>& arrays, double* squares, Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
