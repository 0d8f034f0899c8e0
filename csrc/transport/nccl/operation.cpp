#include "transport/nccl/operation.h"

namespace pycomm::nccl {
namespace {

const char* function_of(Kind kind) {
    constexpr const char* kFunctions[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                          "ncclBroadcast", "ncclSend",          "ncclRecv"};
    return kFunctions[static_cast<int>(kind)];
}

Result issue_one(const Library& library, Comm comm, const Operation& operation) {
    auto count = static_cast<size_t>(operation.count);
    int dtype = code_of(operation.dtype);
    const void* in = operation.in;
    void* out = operation.out;
    switch (operation.kind) {
        case Kind::kAllReduce:
            return library.all_reduce(in, out, count, dtype, operation.argument, comm, operation.stream);
        case Kind::kReduceScatter:
            return library.reduce_scatter(in, out, count, dtype, operation.argument, comm, operation.stream);
        case Kind::kAllGather:
            return library.all_gather(in, out, count, dtype, comm, operation.stream);
        case Kind::kBroadcast:
            return library.broadcast(in, out, count, dtype, operation.argument, comm, operation.stream);
        case Kind::kSend:
            return library.send(in, count, dtype, operation.argument, comm, operation.stream);
        case Kind::kRecv:
            return library.recv(out, count, dtype, operation.argument, comm, operation.stream);
    }
    return kInvalidArgument;
}

}  // namespace

const char* name_of(Kind kind) {
    constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "recv"};
    return kNames[static_cast<int>(kind)];
}

Result issue(const Library& library, Comm comm, const std::vector<Operation>& operations, const char** function) {
    if (operations.size() == 1) {
        *function = function_of(operations.front().kind);
        return issue_one(library, comm, operations.front());
    }
    *function = "ncclGroupStart";
    Result result = library.group_start();
    if (result != kSuccess) return result;
    for (const Operation& operation : operations) {
        *function = function_of(operation.kind);
        result = issue_one(library, comm, operation);
        if (result == kSuccess || result == kInProgress) continue;
        library.group_end();  // or this thread's later calls, those that abort among them, would only be collected
        return result;
    }
    *function = "ncclGroupEnd";
    return library.group_end();
}

}  // namespace pycomm::nccl
