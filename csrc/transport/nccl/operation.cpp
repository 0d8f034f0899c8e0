#include "transport/nccl/operation.h"

#include <bit>

#include "device/runtime.h"

namespace pycomm::nccl {
namespace {

const char* function_of(Kind kind) {
    constexpr const char* kFunctions[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast",
                                          "ncclSend",      "ncclRecv",          "ncclReduce"};
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
        case Kind::kReduce:
            return library.reduce(in, out, count, dtype, operation.argument, operation.root, comm, operation.stream);
    }
    return kInvalidArgument;
}

}  // namespace

const char* name_of(Kind kind) {
    constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                      "send",       "recv",           "reduce"};
    return kNames[static_cast<int>(kind)];
}

uint64_t key_of(const Operation& operation) {
    // NCCL chooses an algorithm by size; within a factor of two the choice seldom changes.
    auto size = static_cast<uint64_t>(std::bit_width(static_cast<uint64_t>(operation.count)));
    uint64_t what = static_cast<uint64_t>(operation.kind) << 8 | static_cast<uint64_t>(operation.dtype);
    uint32_t argument = static_cast<uint32_t>(operation.argument) | static_cast<uint32_t>(operation.root) << 8;
    return what << 48 | size << 32 | argument;
}

Outcome register_memory(Session& session, void* memory, int64_t num_bytes, bool symmetric, void** handle) {
    constexpr int kSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC
    device::Guard guard(session.device());
    const Library& library = session.nccl();
    auto bytes = static_cast<size_t>(num_bytes);
    if (!symmetric) {
        return {session.settle(library.comm_register(session.comm(), memory, bytes, handle)), "ncclCommRegister"};
    }
    return {session.settle(library.comm_window_register(session.comm(), memory, bytes, handle, kSymmetric)),
            "ncclCommWindowRegister"};
}

Outcome issue(Session& session, const std::vector<Operation>& operations) {
    device::Guard guard(session.device());
    const Library& library = session.nccl();
    if (operations.size() == 1) {
        const Operation& only = operations.front();
        return {session.settle(issue_one(library, session.comm(), only)), function_of(only.kind)};
    }
    Result result = library.group_start();
    if (result != kSuccess) return {result, "ncclGroupStart"};
    for (const Operation& operation : operations) {
        result = issue_one(library, session.comm(), operation);
        if (result == kSuccess || result == kInProgress) continue;
        library.group_end();  // otherwise this thread's later calls, aborts included, would only be collected
        return {result, function_of(operation.kind)};
    }
    return {session.settle(library.group_end()), "ncclGroupEnd"};
}

}  // namespace pycomm::nccl
