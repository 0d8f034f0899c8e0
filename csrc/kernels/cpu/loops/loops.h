// The inner loops of the CPU kernels: one table of function pointers per instruction set, chosen once at run time.
//
// Every file of this directory except dispatch.cpp is compiled once per instruction set into its own namespace. Those
// files include no standard header with inline functions of its own: the linker would be free to keep the AVX-512 copy
// of such a function for everybody.
//
// All loops: any alignment, any count including 0, no allocation, no threads. Floating point contraction is off, so
// that every instruction set gives the same bits.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace pycomm {

enum class ReduceOp : uint8_t { kSum, kMean, kMin, kMax };

// Stores go past the caches, for outputs that will not be read again before they would have been evicted.
enum class Store : uint8_t { kCached, kStreaming };

// Candidates of a top-k selection: key = bits of |x|, index = position in the array.
struct Candidate {
    uint32_t key;
    uint32_t index;
};

struct Loops {
    const char* name;

    // dst[i] = src[i] * scale, computed in float (double if either side is), rounded once per conversion. Returns
    // whether everything written is finite.
    bool (*convert)(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t count, double scale,
                    Store store);

    // acc[i] = residual[i] + grad[i] * scale; residual may be null (zeros). acc and residual are of acc_dtype, float or
    // double. Returns whether everything written is finite.
    bool (*accumulate)(void* acc, const void* residual, DType acc_dtype, const void* grad, DType grad_dtype,
                       int64_t count, double scale);

    // The largest |x[i]|, NaN if there is one.
    float (*absmax)(const void* x, DType dtype, int64_t count);

    // outs[j][i] = op over p of inputs[p][i], in the order of p; half types accumulate in float, kMean multiplies the
    // sum by 1/num_inputs before the one rounding. An output may be exactly an input.
    void (*reduce)(void* const* outs, int num_outs, const void* const* inputs, int num_inputs, DType dtype, ReduceOp op,
                   int64_t count, Store store);

    // Appends every i with bits(|x[i]|) > threshold, in order, while there is room for a whole vector more.
    // Returns how many elements were looked at: less than count when `capacity` was too small.
    int64_t (*collect)(const float* x, int64_t count, uint32_t threshold, uint32_t first_index, Candidate* out,
                       int64_t capacity, int64_t* num_collected);
};

// Free places that collect() needs beyond what it keeps.
inline constexpr int64_t kCollectSlack = 64;

// The widest set this processor has, unless select_loops named another.
const Loops& loops();

// name: "avx512", "avx2", "baseline". False if this build or processor lacks it.
bool select_loops(const char* name);

}  // namespace pycomm
