// Cores that processes may use.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace pycomm {

// Whether this process and `peers` of its host could each have a core of its own at the same time, as far as their
// affinities and the limits of their control groups go. A peer that may not be looked at (0) counts as one like this
// process. root: what stands for /, for tests of control groups.
bool have_a_core_each(const std::vector<pid_t>& peers, const std::string& root = "");

// Has this thread go on on another one of the cores that it may use, if there is one.
void leave_this_core();

}  // namespace pycomm
