// One operation as NCCL is given it.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "device/stream.h"
#include "transport/nccl/library.h"

namespace pycomm::nccl {

enum class Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kSend, kRecv };

struct Operation {
    Kind kind;
    const void* in;
    void* out;
    int64_t count;
    DType dtype;
    int argument;  // the reduction, the root or the peer
    Stream stream;
};

const char* name_of(Kind kind);  // "all_reduce"

// Gives them to NCCL, several as one group. *function names the one of NCCL's functions that the result is from.
Result issue(const Library& library, Comm comm, const std::vector<Operation>& operations, const char** function);

}  // namespace pycomm::nccl
