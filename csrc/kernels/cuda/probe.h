// The smallest kernel there is: proves that device code was built, linked and can run here.
#pragma once

#include <string>

namespace pycomm {

// "ok" when the kernel ran and computed what it should; else what the runtime said. Never throws, needs no driver.
std::string probe_cuda();

}  // namespace pycomm
