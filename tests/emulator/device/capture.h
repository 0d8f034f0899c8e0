// Captures of CUDA graphs in the emulator: what a captured stream is given is recorded, and runs when the graph is
// launched. What CUDA forbids meanwhile fails as it does there, with the same names of errors.
#pragma once

#include <cstdint>
#include <functional>

#include "device/stream.h"

namespace pycomm::capture {

enum Mode { kGlobal, kThreadLocal, kRelaxed };

Mode exchange_mode(Mode mode);  // the calling thread's; returns the one before

// The capture that `stream` takes part in, 0: none.
int64_t of(Stream stream);

// True if `stream` is captured: then `work` belongs to the graph, and must not be done now.
bool takes(Stream stream, std::function<void()> work);

// What CUDA calls potentially unsafe. A DeviceError, and the captures concerned are invalid, where the mode forbids it.
void require_safe(const char* what);

// Streams that wait for each other: `stream` takes part in the capture of the event from now on. A DeviceError if it is
// captured and the event is not of the same capture.
void join(Stream stream, int64_t capture_of_event, Stream recorded_on);

// A DeviceError that says what is forbidden in a capture whatever the mode; the capture, if it is one, becomes invalid.
[[noreturn]] void forbid(const char* what, const char* error, int64_t capture);

}  // namespace pycomm::capture
