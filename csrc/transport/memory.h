// Memory of the machine, as the kernel accounts for it.
#pragma once

#include <cstdint>
#include <string>

namespace pycomm {

// Bytes of memory this process may still use, as far as the kernel and its control groups (versions 1 and 2, all
// levels) say. `root` is prepended to the paths of the system's files, for tests.
int64_t available_memory(const std::string& root = "");

}  // namespace pycomm
