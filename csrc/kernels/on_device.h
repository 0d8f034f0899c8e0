// Arguments of kernels on a GPU besides arrays: factors and scratch memory.
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

// A factor: `value`, times *on_device, divided by *divisor, if these are not null. They are read when the kernel runs,
// so a loss scale on the device needs no wait.
struct Scale {
    double value = 1.0;
    const float* on_device = nullptr;
    const float* divisor = nullptr;
};

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
