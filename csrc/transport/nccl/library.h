// NCCL, found and loaded at its first use. It is needed neither to build pycomm nor to import it.
//
// The declarations below are this file's own description of NCCL's binary interface since 2.14, the first version with
// non-blocking communicators. They are a contract with a foreign library: no value and no order of members may change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "device/stream.h"
#include "kernels/reduce_op.h"

namespace pycomm::nccl {

enum Result : int {
    kSuccess = 0,
    kUnhandledCudaError = 1,
    kSystemError = 2,
    kInternalError = 3,
    kInvalidArgument = 4,
    kInvalidUsage = 5,
    kRemoteError = 6,
    kInProgress = 7,
    kTimeout = 8,
};
std::string name_of(Result result);  // "ncclRemoteError"

using Comm = void*;  // ncclComm_t

inline constexpr size_t kUniqueIdBytes = 128;
struct UniqueId {
    char bytes[kUniqueIdBytes];
};

// ncclConfig_t as of 2.14. Newer versions read `size` bytes of it, and use defaults for newer fields.
struct Config {
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21400;
    int blocking = 1;
};

int code_of(DType dtype);  // ncclDataType_t
int code_of(ReduceOp op);  // ncclRedOp_t; ArgumentError for bitwise ones

struct Library {
    std::string path;
    int version_code = 0;
    std::string version() const;  // "2.27.3"

    Result (*get_version)(int*);
    Result (*get_unique_id)(UniqueId*);
    Result (*comm_init_rank_config)(Comm*, int size, UniqueId, int rank, Config*);
    Result (*comm_get_async_error)(Comm, Result*);
    Result (*comm_finalize)(Comm);
    Result (*comm_destroy)(Comm);
    Result (*comm_abort)(Comm);
    const char* (*get_error_string)(Result);
    const char* (*get_last_error)(Comm);
    Result (*all_reduce)(const void*, void*, size_t count, int dtype, int op, Comm, Stream);
    Result (*reduce_scatter)(const void*, void*, size_t out_count, int dtype, int op, Comm, Stream);
    Result (*all_gather)(const void*, void*, size_t in_count, int dtype, Comm, Stream);
    Result (*broadcast)(const void*, void*, size_t count, int dtype, int root, Comm, Stream);
    Result (*reduce)(const void*, void*, size_t count, int dtype, int op, int root, Comm, Stream);
    Result (*send)(const void*, size_t count, int dtype, int peer, Comm, Stream);
    Result (*recv)(void*, size_t count, int dtype, int peer, Comm, Stream);
    Result (*group_start)();
    Result (*group_end)();
    // These came with 2.19; null in older versions.
    Result (*mem_alloc)(void**, size_t);
    Result (*mem_free)(void*);
    Result (*comm_register)(Comm, void*, size_t, void** handle);
    Result (*comm_deregister)(Comm, void* handle);
    // These came with 2.27.
    Result (*comm_window_register)(Comm, void*, size_t, void** window, int flags);
    Result (*comm_window_deregister)(Comm, void* window);

    // Why memory cannot be registered with communicators, or as `symmetric` windows; "" if it can.
    std::string why_not_registered(bool symmetric) const;
    // "ncclRemoteError (remote process exited or there was a network error): <NCCL's last error text>"
    std::string describe(Result result, Comm comm) const;
};

// Finds NCCL: if the environment variable PYCOMM_NCCL_LIBRARY is set, the library it names and no other; else the copy
// that the process has loaded already (PyTorch's, so that there are not two); else the first of `paths` that can be
// loaded; else the system's. It stays loaded for the life of the process. Throws DeviceError saying what was tried and
// what to do.
const Library& library(const std::vector<std::string>& paths);

// Memory that communicators can register, on the current device. Throws DeviceError.
void* allocate(const Library& library, int64_t num_bytes);

// For all ranks of one communicator, made by one of them.
UniqueId make_unique_id(const Library& library);

}  // namespace pycomm::nccl
