// Cores that processes may use.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace pycomm {

// Whether this process and `peers` on its host could each have a core of its own at the same time, judging by their
// affinities and the limits of their control groups. A peer that cannot be inspected (0) counts as one like this
// process. root: replaces /, for tests of control groups.
bool have_a_core_each(const std::vector<pid_t>& peers, const std::string& root = "");

// Moves this thread to another core that it may use, if there is one.
void leave_this_core();

}  // namespace pycomm
