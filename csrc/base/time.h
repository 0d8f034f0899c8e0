// Clock for timeouts: it never goes back, and all processes of a host share it.
#pragma once

#include <time.h>

namespace pycomm {

inline double monotonic_seconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace pycomm
