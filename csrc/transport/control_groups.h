// Control groups, of either version.
#pragma once

#include <functional>
#include <string>

namespace pycomm {

// Calls visit() with the directory of each control group that a process is in and that `controller` may limit, then of
// those around it. is_unified: it is of version 2. pid: a number, or "self". root: what stands for /, for tests.
void for_each_control_group(const std::string& root, const std::string& pid, const std::string& controller,
                            const std::function<void(const std::string& directory, bool is_unified)>& visit);

// The number in the file at `path`, -1 if there is none: "max" is no number.
int64_t number_in(const std::string& path);

}  // namespace pycomm
