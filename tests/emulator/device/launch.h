// The host's version of csrc/device/launch.h: kernels run before the call returns, or when their graph is launched.
#pragma once

#include <cstdint>
#include <string>

#include "device/capture.h"
#include "device/runtime.h"
#include "emulator.h"

namespace pycomm::device {

inline int threads_per_block() { return emulator::settings().threads_per_block; }

namespace detail {

bool fails();        // whether the next launch does
void note_launch();  // on the current device

template <class... Parameters, class... Arguments>
void launch_by(bool together, const char* name, void (*kernel)(Parameters...), int64_t blocks, Stream stream,
               Arguments... arguments) {
    note_launch();
    if (fails()) throw DeviceError(std::string(name) + ": too many resources (cudaErrorLaunchOutOfResources)");
    auto run = [=] {
        auto thread = [=] { kernel(static_cast<Parameters>(arguments)...); };
        emulator::run(name, blocks, threads_per_block(), together, thread);
    };
    if (!capture::takes(stream, run)) run();
}

}  // namespace detail

template <auto kernel, class... Arguments>
void launch(const char* name, int64_t blocks, Stream stream, Arguments... arguments) {
    note_kernel<kernel>();
    detail::launch_by(false, name, kernel, blocks, stream, arguments...);
}

template <auto kernel>
int max_resident_blocks(const char* name) {
    RelaxedCapture relaxed;
    capture::require_safe(name);
    return emulator::settings().resident_blocks;
}

template <auto kernel, class... Arguments>
void launch_together(const char* name, int64_t blocks, Stream stream, Arguments... arguments) {
    note_kernel<kernel>();
    detail::launch_by(true, name, kernel, blocks, stream, arguments...);
}

}  // namespace pycomm::device
