// Arguments of kernels on a GPU other than arrays: factors and scratch memory.
//
// Launchers take a stream, allocate nothing and never wait for the device. Callers size scratch memory with
// <kernel>_workspace_bytes() and pass it in. A launch that fails throws DeviceError; what a kernel finds wrong while it
// runs becomes a fault (below).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "device/stream.h"

namespace pycomm::cuda {

// A factor: `value`, times *on_device, divided by *divisor, if these are not null, and times the power of two that fits
// *largest, or divided by it. They are read when the kernel runs, so a loss scale on the device needs no wait.
struct Scale {
    double value = 1.0;
    const float* on_device = nullptr;
    const float* divisor = nullptr;
    const float* largest = nullptr;
    int room = 0;
    bool unfits = false;  // divided
};

#if defined(__CUDACC__)
#define PYCOMM_ON_BOTH __host__ __device__ inline
#else
#define PYCOMM_ON_BOTH inline
#endif

// The exponent of the power of two that brings a magnitude below, and near, 2**room: at least -126, at most 126; 0 if
// the magnitude, a float of these bits, is 0 or not finite.
PYCOMM_ON_BOTH int fitting_exponent(uint32_t bits, int room) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude == 0 || magnitude >= 0x7f800000u) return 0;
    const int fitting = room - (static_cast<int>(magnitude >> 23) - 126);  // magnitude < 2**(its biased exponent - 126)
    return fitting < -126 ? -126 : fitting > 126 ? 126 : fitting;
}

// One array of a table of arrays, as kernels see it.
struct Entry {
    char* data;
    int64_t begin;  // in the concatenation of all arrays
    DType dtype;
};

// Scratch memory on the device, for calls on one stream, one after the other. The table of arrays at its beginning
// stays valid from call to call: `table` is a copy of what it holds, and only differences are sent again.
struct Workspace {
    char* memory = nullptr;  // aligned to 256 bytes
    int64_t num_bytes = 0;
    std::vector<Entry> table;
};

// Throws ArgumentError if a kernel that ran earlier found its arguments wrong; reads host memory, waits for nothing.
void raise_faults();

}  // namespace pycomm::cuda
