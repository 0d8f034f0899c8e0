// Control groups, of either version.
#pragma once

#include <functional>
#include <string>

namespace pycomm {

// Calls visit() with the directories of a process's control groups that `controller` may limit, each followed by its
// ancestors. is_unified: the group is of version 2. pid: a number, or "self". root: replaces /, for tests.
void for_each_control_group(const std::string& root, const std::string& pid, const std::string& controller,
                            const std::function<void(const std::string& directory, bool is_unified)>& visit);

// The number in the file at `path`; -1 if there is none, or a word such as "max".
int64_t number_in(const std::string& path);

}  // namespace pycomm
