// The host's version of csrc/device/launch.h: kernels run before the call returns.
#pragma once

#include <cstdint>

#include "device/runtime.h"
#include "emulator.h"

namespace pycomm::device {

inline int threads_per_block() { return emulator::settings().threads_per_block; }

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), int64_t blocks, Stream, Arguments... arguments) {
    emulator::run(name, blocks, threads_per_block(), false, [&] { kernel(static_cast<Parameters>(arguments)...); });
}

template <class... Parameters>
int max_resident_blocks(const char*, void (*)(Parameters...)) {
    return emulator::settings().resident_blocks;
}

template <class... Parameters, class... Arguments>
void launch_together(const char* name, void (*kernel)(Parameters...), int64_t blocks, Stream, Arguments... arguments) {
    emulator::run(name, blocks, threads_per_block(), true, [&] { kernel(static_cast<Parameters>(arguments)...); });
}

}  // namespace pycomm::device
