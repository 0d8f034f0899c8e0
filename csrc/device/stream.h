// Handles of the CUDA runtime, for code that must compile where there is none.
#pragma once

namespace pycomm {

using Stream = void*;  // cudaStream_t; null is the legacy default stream
using Event = void*;   // cudaEvent_t

}  // namespace pycomm
