// Arrays as a kernel's argument: a few are passed by value, without an upload; more of them as a table.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/cuda/table.h"

namespace pycomm::cuda {

struct Arrays {
    static constexpr int kFew = 32;  // sixteen of two kinds

    const char* few[kFew];
    const Entry* many;  // null: there are few
    int count;

    PYCOMM_MEMBER const char* operator[](int i) const { return many == nullptr ? few[i] : many[i].data; }
};

inline int64_t arrays_bytes(size_t num_arrays) { return num_arrays <= Arrays::kFew ? 0 : table_bytes(num_arrays); }

inline Arrays arrays_of(const std::vector<Buffer>& buffers, Workspace& workspace, Stream stream) {
    Arrays out = {{}, nullptr, static_cast<int>(buffers.size())};
    if (buffers.size() > Arrays::kFew) {
        out.many = upload(buffers, workspace, stream).entries;
    } else {
        std::transform(buffers.begin(), buffers.end(), out.few, [](const Buffer& buffer) { return buffer.bytes(); });
    }
    return out;
}

}  // namespace pycomm::cuda
