// norms: for each of many arrays the sum of its elements' squares, in double: finite exactly where all elements are
// (float64 elements beyond 1e154 in magnitude count as infinite; so do their squares).
//
// Of any floating types, in any mixture; 0 for an empty array. On the CPU the order of the additions is fixed (32 sums
// that take turns, over blocks of kNormBlock elements from the array's beginning, see cpu/blocks.h), so every
// instruction set and number of threads gives the same bits. On a GPU the order is another fixed one.
// What is written overlaps nothing else of the call.
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
