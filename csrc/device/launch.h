// Starting kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/runtime.h"

namespace pycomm::device {

// Throws a DeviceError that says what failed.
void check(cudaError_t status, const char* what);

// Number of threads per block of a kernel written for any number of them (a multiple of 32, at most kMaxThreads).
inline int threads_per_block() { return 256; }

namespace detail {

using Launcher = cudaError_t (*)(const void* kernel, dim3 blocks, dim3 threads, void** arguments, size_t shared_bytes,
                                 cudaStream_t stream);

template <class... Parameters, class... Arguments>
void launch_by(Launcher how, const char* name, void (*kernel)(Parameters...), int64_t blocks, Stream stream,
               Arguments... arguments) {
    auto with = [&](Parameters... parameters) {
        void* pointers[] = {&parameters...};
        check(how(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                  dim3(static_cast<unsigned>(threads_per_block())), pointers, 0, static_cast<cudaStream_t>(stream)),
              name);
    };
    with(arguments...);
}

}  // namespace detail

template <auto kernel, class... Arguments>
void launch(const char* name, int64_t blocks, Stream stream, Arguments... arguments) {
    note_kernel<kernel>();
    detail::launch_by(cudaLaunchKernel, name, kernel, blocks, stream, arguments...);
}

// Number of blocks of `kernel` that run at once on the current device: the most that grid barriers allow.
template <auto kernel>
int max_resident_blocks(const char* name) {
    RelaxedCapture relaxed;  // the first query of a kernel loads it
    int device = 0, per_multiprocessor = 0;
    check(cudaGetDevice(&device), name);
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, reinterpret_cast<const void*>(kernel),
                                                        threads_per_block(), 0),
          name);
    return per_multiprocessor * num_multiprocessors(device);
}

// All blocks run at the same time, so they may wait for each other.
template <auto kernel, class... Arguments>
void launch_together(const char* name, int64_t blocks, Stream stream, Arguments... arguments) {
    note_kernel<kernel>();
    detail::launch_by(cudaLaunchCooperativeKernel, name, kernel, blocks, stream, arguments...);
}

}  // namespace pycomm::device
