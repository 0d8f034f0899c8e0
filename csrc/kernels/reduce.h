// reduce: combines many arrays of one type into one, element by element.
//
//   outs[j][i] = op(inputs[0][i], ..., inputs[n-1][i]) for every j
//
// The operands are combined in the order of `inputs`, so the same inputs give the same bits, whoever computes them.
// Half types accumulate in float and are rounded once. kMean multiplies the sum by the rounded 1/n before that
// rounding; integers have no mean. NaN wins in kMin and kMax; of +0 and -0 the later operand stays. Integer sums and
// products wrap around. kAnd, kOr and kXor are for integers only. At least one input; all of one dtype and count; an
// output may be exactly one of the inputs, and overlaps none otherwise.
#pragma once

#include <vector>

#include "base/buffer.h"
#include "kernels/on_device.h"
#include "kernels/reduce_op.h"

namespace pycomm {

void reduce(const Buffer& out, const std::vector<Buffer>& inputs, ReduceOp op, int num_threads);

// The same for a range of elements, in the calling thread, with several outputs. They stay in the caches, except for
// the first num_streamed, which bypass them: that pays for outputs that have not been read.
void reduce_range(void* const* outs, int num_outs, const void* const* inputs, int num_inputs, DType dtype, ReduceOp op,
                  int64_t count, int num_streamed = 0);

namespace cuda {

int64_t reduce_workspace_bytes(std::size_t num_inputs);
void reduce(const Buffer& out, const std::vector<Buffer>& inputs, ReduceOp op, Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
