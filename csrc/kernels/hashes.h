// hashes: hashes the bits of the elements of each of many arrays to 64 bits, so that replicas compare 8 bytes.
//
// The sum, modulo 2^64, over the elements i of (low(x[i]) + a(i)) * (high(x[i]) + b(i)), where low and high are the two
// halves of the element's bits as a 64-bit number and a, b follow from i alone: sums of a key of i % 1024 and one of
// i / 1024 (random.h), so that a processor reads most of them from its first cache. 0 for an empty array. After NH
// (Black et al., "UMAC", 1999, section 3), with keys that are no secret: against errors, not against forgers.
//
// The arrays may be of any types, in any mixture. Sums of whole numbers depend on no order, so every instruction set,
// number of threads and device gives the same bits, and so does an array that lies elsewhere. Equal elements have equal
// bits, with the exceptions of 0 and -0, and of NaN. Elements of 4 bytes take little longer than reading them;
// elements of 1 or 2 bytes are bound by the products. An output overlaps no other array of the call.
#pragma once

#include <vector>

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm {

void hashes(const std::vector<Buffer>& arrays, uint64_t* out, int num_threads);

namespace cuda {

int64_t hashes_workspace_bytes(const std::vector<Buffer>& arrays);
// Writes out[j] for arrays[j], on the device.
void hashes(const std::vector<Buffer>& arrays, uint64_t* out, Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
