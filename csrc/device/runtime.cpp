#include "device/runtime.h"

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "device/launch.h"

namespace pycomm::device {
namespace {

cudaStream_t raw(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t raw_event(Event event) { return static_cast<cudaEvent_t>(event); }

// Returns whether this process has a context on `device`, according to the driver that the runtime has loaded.
bool has_context(int device) {
    using Ask = int (*)(int device, unsigned* flags, int* active);  // cuDevicePrimaryCtxGetState
    static const Ask ask = [] {
        void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        return driver == nullptr ? nullptr : reinterpret_cast<Ask>(dlsym(driver, "cuDevicePrimaryCtxGetState"));
    }();
    unsigned flags = 0;
    int active = 0;
    return ask == nullptr || ask(device, &flags, &active) != 0 || active != 0;
}

std::string dotted(int version) {  // 13020 -> 13.2
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

constexpr int kMostDevices = 64;
std::atomic<bool> loaded[kMostDevices];

// Throws a DeviceError unless a kernel was loaded, with advice if the driver lacks code for the GPU.
void require_loaded(cudaError_t status, int device) {
    if (status != cudaErrorNoKernelImageForDevice && status != cudaErrorUnsupportedPtxVersion &&
        status != cudaErrorInvalidPtx && status != cudaErrorJitCompilerNotFound) {
        check(status, "loading a kernel");
        return;
    }
    cudaGetLastError();
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    const std::string capability = std::to_string(major) + std::to_string(minor);
    throw DeviceError(
        format("loading a kernel: %s (%s): this build of pycomm has kernels for %s, by CUDA %s; GPU %d has capability "
               "%d.%d, and "
               "its driver supports CUDA %s: install a newer driver, or build pycomm with CUDAARCHS=%s-real",
               cudaGetErrorString(status), cudaGetErrorName(status), PYCOMM_CUDA_ARCHITECTURES, PYCOMM_CUDA_VERSION,
               device, major, minor, dotted(driver_version()).c_str(), capability.c_str()));
}

}  // namespace

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // otherwise the next call reports it again
    throw DeviceError(format("%s: %s (%s)", what, cudaGetErrorString(status), cudaGetErrorName(status)));
}

int count() {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) == cudaSuccess) return devices;
    cudaGetLastError();
    return 0;
}

int driver_version() {
    int version = 0;
    cudaDriverGetVersion(&version);
    return version;
}

std::string why_none() {
    int driver = driver_version(), devices = 0;
    std::string wanted = "CUDA " + dotted(CUDART_VERSION / 1000 * 1000) + " or newer";
    cudaError_t status = cudaGetDeviceCount(&devices);
    cudaGetLastError();
    if (driver == 0) return "there is no NVIDIA driver (libcuda.so.1): install one that supports " + wanted;
    if (status == cudaErrorInsufficientDriver || driver < CUDART_VERSION / 1000 * 1000) {
        return "the NVIDIA driver is too old: it supports CUDA " + dotted(driver) + ", this build of pycomm requires " +
               wanted + ": install a newer driver, or build pycomm with an older toolkit";
    }
    return std::string("the driver offers no GPU: ") + cudaGetErrorString(status);
}

int device_of(const void* pointer) {
    cudaPointerAttributes attributes = {};
    check(cudaPointerGetAttributes(&attributes, pointer), "asking where an array lies");
    bool there = attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
    return there ? attributes.device : -1;
}

int num_multiprocessors(int device) {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "asking for multiprocessors");
    return count;
}

int exchange_current(int device) {
    int previous = 0;
    check(cudaGetDevice(&previous), "asking for the current device");
    if (device != previous) check(cudaSetDevice(device), "choosing a device");
    return previous;
}

void set_current(int device) noexcept {
    // cudaSetDevice creates the device's context: hundreds of megabytes. A thread that never chose a device is on 0.
    if (has_context(device)) cudaSetDevice(device);
}

void fill_bytes(void* where, int value, int64_t num_bytes, Stream stream) {
    check(cudaMemsetAsync(where, value, static_cast<size_t>(num_bytes), raw(stream)), "filling device memory");
}

void synchronize(Stream stream) { check(cudaStreamSynchronize(raw(stream)), "waiting for the device"); }

bool is_capturing(Stream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(raw(stream), &status), "asking whether a stream is captured");
    return status != cudaStreamCaptureStatusNone;
}

RelaxedCapture::RelaxedCapture() noexcept : previous_(cudaStreamCaptureModeRelaxed) {
    auto mode = cudaStreamCaptureModeRelaxed;
    if (cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess) previous_ = mode;
}

RelaxedCapture::~RelaxedCapture() {
    auto mode = static_cast<cudaStreamCaptureMode>(previous_);
    cudaThreadExchangeStreamCaptureMode(&mode);
}

std::vector<const void*>& kernels() {
    static std::vector<const void*> all;
    return all;
}

bool are_kernels_loaded(int device) { return device < kMostDevices && loaded[device].load(std::memory_order_acquire); }

void load_kernels(int device) {
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    if (are_kernels_loaded(device)) return;
    Guard guard(device);
    RelaxedCapture relaxed;
    for (const void* kernel : kernels()) {
        cudaFuncAttributes attributes;
        require_loaded(cudaFuncGetAttributes(&attributes, kernel), device);
    }
    if (device < kMostDevices) loaded[device].store(true, std::memory_order_release);
}

Stream make_stream(int device) {
    Guard guard(device);
    int lowest = 0, highest = 0;
    cudaStream_t stream = nullptr;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for stream priorities");
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "making a stream");
    return stream;
}

Event make_event() {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    return event;
}

void destroy_event(Event event) { cudaEventDestroy(raw_event(event)); }

void record(Event event, Stream stream) { check(cudaEventRecord(raw_event(event), raw(stream)), "recording an event"); }

void wait_for(Stream stream, Event event) {
    check(cudaStreamWaitEvent(raw(stream), raw_event(event), 0), "letting a stream wait");
}

bool has_happened(Event event) {
    cudaError_t status = cudaEventQuery(raw_event(event));
    if (status != cudaErrorNotReady) check(status, "querying an event");
    if (status == cudaErrorNotReady) cudaGetLastError();
    return status == cudaSuccess;
}

void* allocate_mapped(int64_t num_bytes) {
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, static_cast<size_t>(num_bytes), cudaHostAllocMapped | cudaHostAllocPortable),
          "allocating host memory that kernels can reach");
    std::memset(memory, 0, static_cast<size_t>(num_bytes));
    return memory;
}

bool sync_wanted() {
    static const bool wanted = [] {
        const char* value = std::getenv("PYCOMM_SYNC");
        return value != nullptr && std::strcmp(value, "1") == 0;
    }();
    return wanted;
}

}  // namespace pycomm::device
