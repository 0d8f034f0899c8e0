// absmax: the largest magnitude in many arrays, NaN if any element is NaN; 0 for no elements. Any floating types; the
// result is rounded to float.
#pragma once

#include <vector>

#include "base/buffer.h"

namespace pycomm {

float absmax(const std::vector<Buffer>& arrays, int num_threads);

}  // namespace pycomm
