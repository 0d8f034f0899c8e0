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
#include "kernels/quantization.h"
#include "kernels/reduce_op.h"
#include "kernels/rules.h"

namespace pycomm {

inline constexpr double kNoLimit = __builtin_inf();

// kStreaming: stores bypass the caches, for outputs that would be evicted before they are read.
enum class Store : uint8_t { kCached, kStreaming };

// Candidates of a top-k selection: bits of the element, and its position in the array.
struct Candidate {
    uint32_t bits;
    uint32_t index;
};

// A range of a gradient and what it goes into; pointers may be null as in kernels/accumulate.h.
struct Terms {
    const void* grad;
    const void* weight;
    const void* residual;
    const void* old_velocity;
    void* acc;
    void* velocity;
    DType dtype, grad_dtype;  // dtype: of all but gradient and weight
    int64_t count;
    double scale, decay;
    float momentum;
    bool nesterov;
};

// A growing list of candidates: elements above `limit` in magnitude, and NaNs.
struct Collector {
    float limit;
    uint32_t first_index;  // of the range's first element
    Candidate* list;
    int64_t capacity, count;
    bool full;  // something may have had no room: less than kCollectSlack was left
};

// A range of one parameter; pointers may be null as in kernels/step.h.
struct StepTerms {
    Rule rule;
    const Coefficients* coefficients;
    double scale, rate;
    void* weight;
    const void* grad;
    void* copy;
    void* states[kMostStates];
    DType dtype, grad_dtype, copy_dtype;  // dtype: of weight and states
    int64_t count;
    double* squares;  // two: of weight and direction
    // Of other processes, as in kernels/step.h.
    void* const* mirrors;
    int num_mirrors;
    Store mirror_store;
};

// What kernels/indices.h says of `count` indices below `range`.
struct IndexCode {
    int64_t count, range;
    int low;
    int64_t lower_words, upper_words;
};

// kernels/low_rank.h for some rows of one matrix. m, x: rows of `stride` elements, of which `columns` take part. q: a
// row for each column of Q, `q_stride` apart. p: some rows of P.
template <class T>
struct ThinLoops {
    // p = m q^T, where rows of m and q have as many elements as `columns`.
    void (*rows)(const T* m, int64_t rows, int64_t columns, const T* q, int64_t rank, T* p);
    // q += p^T m
    void (*columns)(const T* m, int64_t stride, int64_t rows, int64_t columns, const T* p, int64_t rank, T* q,
                    int64_t q_stride);
    // x = factor p q, or if it `adds` x += factor p q
    void (*outer)(const T* p, int64_t rows, int64_t rank, const T* q, int64_t q_stride, T* x, int64_t stride,
                  int64_t columns, T factor, bool adds);
};

struct Loops {
    const char* name;

    // dst[i] = src[i] * scale, computed in float (double if either side is), rounded once per conversion. Returns
    // whether everything written is finite, and src[i] * scale below `limit` in magnitude.
    bool (*convert)(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t count, double scale,
                    double limit, Store store);

    // Copies src to dst, which do not overlap.
    void (*copy)(const void* src, void* dst, int64_t num_bytes, Store store);

    // kernels/accumulate.h for one range of one gradient. Sums that exceed the collector's limit are appended to its
    // list; the collector may be null. Returns whether all of acc is finite. acc and velocity are streamed if they have
    // the same alignment.
    bool (*accumulate)(const Terms& terms, Store store, Collector* collector);

    // The largest |x[i]|, NaN if there is one.
    float (*absmax)(const void* x, DType dtype, int64_t count);

    // kernels/hashes.h for a range of one array with elements of `itemsize` bytes: x[0] is element `first`.
    uint64_t (*hash)(const void* x, int64_t itemsize, int64_t count, int64_t first);

    // The sum of all x[i]^2: 32 interleaved sums, which are added pairwise in the end.
    double (*squares)(const void* x, DType dtype, int64_t count);

    // kernels/step.h for one range of one parameter.
    void (*step)(const StepTerms& terms);

    // outs[j][i] = op over p of inputs[p][i], in the order of p; half types accumulate in float, kMean multiplies the
    // sum by 1/num_inputs before the one rounding. An output may be exactly an input. The first num_streamed outputs
    // are streamed, if these are aligned.
    void (*reduce)(void* const* outs, int num_outs, const void* const* inputs, int num_inputs, DType dtype, ReduceOp op,
                   int64_t count, int num_streamed);

    // Writes every i with |x[i]| > limit, and every NaN, in order. Returns how many; -1 if they had no room: capacity
    // has to exceed their number by kCollectSlack. limit: not negative, not NaN.
    int64_t (*collect)(const float* x, int64_t count, float limit, uint32_t first_index, Candidate* out,
                       int64_t capacity);

    // How many x[i] are NaN or have |x[i]| > limit; limit as for collect.
    int64_t (*count_above)(const float* x, int64_t count, float limit);

    // kernels/indices.h. Returns the place of the first index that does not ascend or lies outside [0, range); count if
    // there is none. Words are of uint32_t, aligned; indices of int32_t too.
    int64_t (*pack_indices)(const int32_t* indices, const IndexCode& code, uint32_t* words);
    // False where pack_indices cannot have made the words.
    bool (*unpack_indices)(const uint32_t* words, const IndexCode& code, int32_t* indices);

    // kernels/quantize.h for the elements from `first` on, where a block begins. dequantize streams if
    // there is one contribution and out is aligned.
    void (*quantize)(const float* x, int64_t count, int64_t first, const Quantization& config, const int64_t* seed,
                     float* scales, uint8_t* codes, float* remainder);
    void (*dequantize)(const float* const* scales, const uint8_t* const* codes, int num_contributions,
                       const Quantization& config, float* out, int64_t count, float factor, Store store);
    void (*requantize)(const float* const* scales, const uint8_t* const* codes, int num_contributions, int64_t count,
                       int64_t first, const Quantization& config, const int64_t* seed, float* out_scales,
                       uint8_t* out_codes, float* remainder);

    // kernels/signs.h; unpack_signs streams if out is aligned.
    void (*pack_signs)(const float* x, int64_t count, float magnitude, uint32_t* words, float* remainder);
    void (*unpack_signs)(const uint32_t* const* words, const float* magnitudes, int num_contributions, float* out,
                         int64_t count, float factor, Store store);

    ThinLoops<float> thin;
    ThinLoops<double> thin_double;
};

// Free places that a list of candidates needs beyond what it keeps.
inline constexpr int64_t kCollectSlack = 64;

// The widest set this processor has, unless select_loops named another.
const Loops& loops();

// name: "avx512", "avx2", "baseline". False if this build or processor lacks it.
bool select_loops(const char* name);

}  // namespace pycomm
