// Functions that each instruction set's namespace defines; table.cpp puts them into its Loops.
#pragma once

#include <type_traits>

#include "kernels/cpu/loops/loops.h"

namespace pycomm::PYCOMM_ISA {

bool convert(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t count, double scale, double limit,
             Store mode);
void copy(const void* src, void* dst, int64_t num_bytes, Store mode);
bool accumulate(const Terms& terms, Store store, Collector* collector);
float absmax(const void* x, DType dtype, int64_t count);
uint64_t hash(const void* x, int64_t itemsize, int64_t count, int64_t first);
double squares(const void* x, DType dtype, int64_t count);
void step(const StepTerms& terms);
void reduce(void* const* outs, int num_outs, const void* const* inputs, int num_inputs, DType dtype, ReduceOp op,
            int64_t count, int num_streamed);
int64_t collect(const float* x, int64_t count, float limit, uint32_t first_index, Candidate* out, int64_t capacity);
int64_t count_above(const float* x, int64_t count, float limit);
int64_t pack_indices(const int32_t* indices, const IndexCode& code, uint32_t* words);
bool unpack_indices(const uint32_t* words, const IndexCode& code, int32_t* indices);
void quantize(const float* x, int64_t count, int64_t first, const Quantization& config, const int64_t* seed,
              float* scales, uint8_t* codes, float* remainder);
void dequantize(const float* const* scales, const uint8_t* const* codes, int num_contributions,
                const Quantization& config, float* out, int64_t count, float factor, Store mode);
void requantize(const float* const* scales, const uint8_t* const* codes, int num_contributions, int64_t count,
                int64_t first, const Quantization& config, const int64_t* seed, float* out_scales, uint8_t* out_codes,
                float* remainder);
void pack_signs(const float* x, int64_t count, float magnitude, uint32_t* words, float* remainder);
void unpack_signs(const uint32_t* const* words, const float* magnitudes, int num_contributions, float* out,
                  int64_t count, float factor, Store mode);
template <class T>
void thin_rows(const T* m, int64_t rows, int64_t columns, const T* q, int64_t rank, T* p);
template <class T>
void thin_columns(const T* m, int64_t stride, int64_t rows, int64_t columns, const T* p, int64_t rank, T* q,
                  int64_t q_stride);
template <class T>
void thin_outer(const T* p, int64_t rows, int64_t rank, const T* q, int64_t q_stride, T* x, int64_t stride,
                int64_t columns, T factor, bool adds);

}  // namespace pycomm::PYCOMM_ISA
