// The part of the CUDA runtime that the host side uses. A call that fails throws a DeviceError that names it.
//
// tests/emulator/device/runtime.cpp implements the same functions for the host; launch.h has the templates.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/stream.h"

namespace pycomm::device {

// 0 without a usable driver; never throws.
int count();
// Why count() is 0: names the driver's version and the one that this build requires.
std::string why_none();
// The newest CUDA that the driver supports, 12030 for 12.3; 0 without a driver.
int driver_version();

// The device that `pointer` lies on; -1 for memory that is not a device's.
int device_of(const void* pointer);
int num_multiprocessors(int device);

// The calling thread's current device.
int exchange_current(int device);  // returns the one before
// Back to an earlier one; does nothing where that would make a context on a GPU that this process does not use.
void set_current(int device) noexcept;

// Makes `device` the current one until it goes out of scope.
class Guard {
   public:
    explicit Guard(int device) : previous_(exchange_current(device)) {}
    ~Guard() { set_current(previous_); }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    int previous_;
};

void fill_bytes(void* where, int value, int64_t num_bytes, Stream stream);
void synchronize(Stream stream);
bool is_capturing(Stream stream);  // into a CUDA graph: work is recorded, not executed

// For calls that cannot be captured the first time, because they must prepare something then.
inline DeviceError warm_up_wanted(const std::string& what, const std::string& why) {
    return DeviceError(
        format("%s: the stream is being captured into a CUDA graph, and %s: run it once before the capture (warm up)",
               what.c_str(), why.c_str()));
}

// While one exists, this thread does not disturb captures of CUDA graphs, by any thread. By default, while some thread
// captures, CUDA refuses calls that it considers potentially unsafe (querying an event, allocating), and invalidates
// that capture.
class RelaxedCapture {
   public:
    RelaxedCapture() noexcept;
    ~RelaxedCapture();
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

   private:
    int previous_;
};

// All kernels: launch() notes those that it is compiled for.
std::vector<const void*>& kernels();
template <auto kernel>
struct Noted {
    static inline const bool value = (kernels().push_back(reinterpret_cast<const void*>(kernel)), true);
};
template <auto kernel>
void note_kernel() {
    static_cast<void>(Noted<kernel>::value);
}

// Loads all kernels on `device`, once. CUDA otherwise loads each before its first launch, for which it may have to wait
// until the device is idle; and NCCL's kernels there wait for other ranks.
void load_kernels(int device);
bool are_kernels_loaded(int device);

// A new stream. It does not wait for the legacy default stream, and has the highest priority.
Stream make_stream(int device);

Event make_event();
void destroy_event(Event event);
void record(Event event, Stream stream);
void wait_for(Stream stream, Event event);  // later work on `stream` starts after `event`
bool has_happened(Event event);             // unsafe: see RelaxedCapture; an error for an event of a capture

// Host memory that kernels can write to; zeros. Never freed. Unsafe: see RelaxedCapture.
void* allocate_mapped(int64_t num_bytes);

// Returns whether PYCOMM_SYNC=1 was set at the first call: kernels are then waited for, and their failures reported.
bool sync_wanted();

}  // namespace pycomm::device
