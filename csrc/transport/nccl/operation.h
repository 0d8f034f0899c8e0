// One operation of NCCL.
#pragma once

#include <cstdint>
#include <functional>
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

using Work = std::function<Outcome(Session&)>;  // inside NCCL: see Session

// Lets NCCL read and write `memory` where it lies; `handle` is for the deregistration. A `symmetric` window is a
// collective of all ranks. Runs inside NCCL, as issue() does.
Outcome register_memory(Session& session, void* memory, int64_t num_bytes, bool symmetric, void** handle);

// Issues the operations, several as one group, and waits until NCCL has accepted them. Runs inside NCCL: see Session.
Outcome issue(Session& session, const std::vector<Operation>& operations);

}  // namespace pycomm::nccl
