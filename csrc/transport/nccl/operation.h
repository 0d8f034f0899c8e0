// One operation as NCCL is given it.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "device/stream.h"
#include "transport/nccl/session.h"

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

// Operations of one key make NCCL use the same connections, which it makes at the first of them.
uint64_t key_of(const Operation& operation);

struct Outcome {
    Result result = kUnhandledCudaError;
    const char* function = "cudaSetDevice";  // which one `result` is from
};

// Gives them to NCCL, several as one group, and waits until it has got them under way. Inside NCCL: see Session.
Outcome issue(Session& session, const std::vector<Operation>& operations);

}  // namespace pycomm::nccl
