// One operation of NCCL.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "device/stream.h"
#include "transport/nccl/session.h"

namespace pycomm::nccl {

enum class Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kSend, kRecv, kReduce };

struct Operation {
    Kind kind;
    const void* in;
    void* out;
    int64_t count;
    DType dtype;
    int argument;  // the reduction, the root or the peer
    Stream stream;
    int root = 0;  // of kReduce
};

const char* name_of(Kind kind);  // "all_reduce"

// Operations with the same key use the same connections, which NCCL makes for the first of them.
uint64_t key_of(const Operation& operation);

struct Outcome {
    Result result = kUnhandledCudaError;
    const char* function = "cudaSetDevice";  // the one that returned `result`
};

// Issues the operations, several as one group, and waits until NCCL has accepted them. Runs inside NCCL: see Session.
Outcome issue(Session& session, const std::vector<Operation>& operations);

}  // namespace pycomm::nccl
