// What each instruction set's namespace defines; table.cpp puts them into its Loops.
#pragma once

#include <type_traits>

#include "kernels/cpu/loops/loops.h"

namespace pycomm::PYCOMM_ISA {

bool convert(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t count, double scale, Store mode);
bool accumulate(void* acc, const void* residual, DType acc_dtype, const void* grad, DType grad_dtype, int64_t count,
                double scale);
float absmax(const void* x, DType dtype, int64_t count);
void reduce(void* const* outs, int num_outs, const void* const* inputs, int num_inputs, DType dtype, ReduceOp op,
            int64_t count, Store mode);
int64_t collect(const float* x, int64_t count, uint32_t threshold, uint32_t first_index, Candidate* out,
                int64_t capacity, int64_t* num_collected);

}  // namespace pycomm::PYCOMM_ISA
