#include "kernels/cuda/probe.h"

#include <cuda_runtime.h>

namespace pycomm {
namespace {

constexpr int kThreads = 32;

__global__ void square_indices(int* out) {
    int i = static_cast<int>(threadIdx.x);
    out[i] = i * i;
}

cudaError_t run(int* host) {
    int* device = nullptr;
    cudaError_t status = cudaMalloc(reinterpret_cast<void**>(&device), kThreads * sizeof(int));
    if (status != cudaSuccess) return status;
    square_indices<<<1, kThreads>>>(device);
    status = cudaGetLastError();
    if (status == cudaSuccess) status = cudaMemcpy(host, device, kThreads * sizeof(int), cudaMemcpyDeviceToHost);
    cudaError_t freed = cudaFree(device);
    return status != cudaSuccess ? status : freed;
}

}  // namespace

std::string probe_cuda() {
    int out[kThreads] = {};
    cudaError_t status = run(out);
    if (status != cudaSuccess) return cudaGetErrorString(status);
    for (int i = 0; i < kThreads; ++i) {
        if (out[i] != i * i) return "the kernel computed something else";
    }
    return "ok";
}

}  // namespace pycomm
