// View of an array that a kernel or a collective works on: address, count and type. It owns nothing.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace pycomm {

struct Buffer {
    void* data = nullptr;
    int64_t count = 0;  // elements
    DType dtype = DType::kF32;
    int device = kHost;  // ordinal of the GPU whose memory it is
    uint8_t tag = 0;     // for bytes of another type: hash of that type's name; 0: numbers of `dtype`

    static constexpr int kHost = -1;

    int64_t num_bytes() const { return count * size_of(dtype); }
    char* bytes() const { return static_cast<char*>(data); }
};

}  // namespace pycomm
