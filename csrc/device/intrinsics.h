// All device instructions that the CUDA kernels use. Kernels must not use any others.
//
// tests/emulator/device/intrinsics.h implements the same names for the host, so that the same kernel source also runs
// where no GPU exists: keep the two in step.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "base/dtype.h"

#define PYCOMM_KERNEL __global__ void __launch_bounds__(256)
// With `blocks` blocks at once on a multiprocessor; each may use the registers that this leaves.
#define PYCOMM_KERNEL_OF(blocks) __global__ void __launch_bounds__(256, blocks)
#define PYCOMM_DEVICE static __device__ __forceinline__
#define PYCOMM_MEMBER __device__ __forceinline__
#define PYCOMM_HOST_DEVICE static __host__ __device__ __forceinline__
// An array in the block's shared memory, uninitialized. Each place in the source has an array of its own.
#define PYCOMM_SHARED(type, name, count) __shared__ type name[count]

namespace pycomm::device {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// Indices. Blocks and threads are one-dimensional; a block is a multiple of 32 threads, at most kMaxThreads.
inline constexpr int kMaxThreads = 256;
PYCOMM_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
PYCOMM_DEVICE int num_threads() { return static_cast<int>(blockDim.x); }
PYCOMM_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
PYCOMM_DEVICE int num_blocks() { return static_cast<int>(gridDim.x); }

// Every thread of the block must call it. What they wrote to shared and device memory before is visible to all after.
PYCOMM_DEVICE void block_barrier() { __syncthreads(); }

// Among the lanes of a warp; all 32 take part.
PYCOMM_DEVICE unsigned ballot(bool predicate) { return __ballot_sync(kAllLanes, predicate); }
template <class T>
PYCOMM_DEVICE T shuffle(T value, int lane) {
    return __shfl_sync(kAllLanes, value, lane);
}
// The value of the lane `delta` below; lanes without one keep their own.
template <class T>
PYCOMM_DEVICE T shuffle_up(T value, int delta) {
    return __shfl_up_sync(kAllLanes, value, static_cast<unsigned>(delta));
}

// Relaxed atomics on shared or device memory; they return the old value.
PYCOMM_DEVICE uint32_t atomic_add(uint32_t* where, uint32_t value) { return atomicAdd(where, value); }
PYCOMM_DEVICE uint32_t atomic_max(uint32_t* where, uint32_t value) { return atomicMax(where, value); }
PYCOMM_DEVICE uint32_t atomic_min(uint32_t* where, uint32_t value) { return atomicMin(where, value); }
PYCOMM_DEVICE uint32_t atomic_read(const uint32_t* where) { return *static_cast<const volatile uint32_t*>(where); }
// Orders this thread's memory accesses before it against those after it, for the whole device.
PYCOMM_DEVICE void device_fence() { __threadfence(); }
// The same for the host too.
PYCOMM_DEVICE void system_fence() { __threadfence_system(); }
// Inside a loop that waits for another block.
PYCOMM_DEVICE void pause() {
#if __CUDA_ARCH__ >= 700
    __nanosleep(40);
#endif
}

// Bits.
PYCOMM_DEVICE int count_ones(uint32_t x) { return __popc(x); }
PYCOMM_DEVICE int lowest_one(uint32_t x) { return __ffs(static_cast<int>(x)) - 1; }
PYCOMM_DEVICE int highest_one(uint32_t x) { return 31 - __clz(static_cast<int>(x)); }
PYCOMM_DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
PYCOMM_DEVICE uint64_t bits_of(double x) { return static_cast<uint64_t>(__double_as_longlong(x)); }
PYCOMM_DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }
PYCOMM_DEVICE double double_of(uint64_t bits) { return __longlong_as_double(static_cast<long long>(bits)); }

// Conversions, to the nearest even.
PYCOMM_DEVICE float to_float(F16 x) { return __half2float(__ushort_as_half(x.bits)); }
PYCOMM_DEVICE float to_float(BF16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
PYCOMM_DEVICE F16 to_f16(float x) { return {__half_as_ushort(__float2half_rn(x))}; }
PYCOMM_DEVICE BF16 to_bf16(float x) { return {__bfloat16_as_ushort(__float2bfloat16_rn(x))}; }

}  // namespace pycomm::device
