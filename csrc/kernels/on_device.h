// Arguments of kernels on a GPU besides arrays: factors and scratch memory.
//
// Launchers take a stream, allocate nothing and never wait for the device. Scratch memory is asked for with
// <kernel>_workspace_bytes() and passed in. A launch that fails throws DeviceError; what a kernel finds wrong while it
// runs becomes a fault (below).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "device/stream.h"

namespace pycomm::cuda {

// A factor: `value`, times what lies at `on_device`, divided by what lies at `divisor`, where they are not null. Read
// when the kernel runs, so that a loss scale that only the device knows needs no wait.
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

// Scratch memory on the device, for calls on one stream, one after the other. A table of arrays at its beginning stays
// valid from call to call: it is sent again only where it differs from `table`, what it holds now.
struct Workspace {
    char* memory = nullptr;  // aligned to 256 bytes
    int64_t num_bytes = 0;
    std::vector<Entry> table;
};

// Throws ArgumentError if a kernel that ran earlier found its arguments wrong; reads host memory, waits for nothing.
void raise_faults();

}  // namespace pycomm::cuda
