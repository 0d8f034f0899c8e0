// scatter_add: out[indices[j]] += values[j] * scale, j in ascending order.
//
// values and out of any floating types. The product is computed in float (double if either side is double) and rounded
// before the sum, which is rounded to out's dtype each time. Repeated indices add up in order. Throws ArgumentError,
// having written nothing, if an index lies outside out.
#pragma once

#include "base/buffer.h"

namespace pycomm {

void scatter_add(const Buffer& out, const int32_t* indices, const Buffer& values, double scale);

}  // namespace pycomm
