#include "transport/nccl/library.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "base/error.h"

namespace pycomm::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr const char* kLibraryVariable = "PYCOMM_NCCL_LIBRARY";
constexpr const char* kAdvice =
    "install NCCL 2.14 or newer (pip install nvidia-nccl-cu13, or -cu12 for a CUDA 12 driver), or set "
    "PYCOMM_NCCL_LIBRARY to the path of a libnccl.so.2";
constexpr int kOldestVersion = 21400;
constexpr int kRegisteringVersion = 21900;
// Windows came with 2.27. Before 2.29.7 the kernels that use them look at no abort flag: a lost rank would hang the
// others for good.
constexpr int kWindowVersion = 22907;

std::string dotted(int code) {
    // Up to 2.8 a version was X * 1000 + Y * 100 + Z.
    int major = code < 10000 ? code / 1000 : code / 10000;
    int minor = code < 10000 ? code % 1000 / 100 : code % 10000 / 100;
    return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(code % 100);
}

std::string last_dl_error() {
    const char* text = dlerror();
    return text != nullptr ? text : "unknown error";
}

template <class Function>
void resolve(void* handle, const char* name, Function& function, std::string& missing) {
    void* symbol = dlsym(handle, name);
    function = reinterpret_cast<Function>(symbol);
    if (symbol == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
}

// The names of the functions that `handle` lacks, "" if it has all of them.
std::string resolve_all(void* handle, Library& into) {
    std::string missing;
    resolve(handle, "ncclGetVersion", into.get_version, missing);
    resolve(handle, "ncclGetUniqueId", into.get_unique_id, missing);
    resolve(handle, "ncclCommInitRankConfig", into.comm_init_rank_config, missing);
    resolve(handle, "ncclCommGetAsyncError", into.comm_get_async_error, missing);
    resolve(handle, "ncclCommFinalize", into.comm_finalize, missing);
    resolve(handle, "ncclCommDestroy", into.comm_destroy, missing);
    resolve(handle, "ncclCommAbort", into.comm_abort, missing);
    resolve(handle, "ncclGetErrorString", into.get_error_string, missing);
    resolve(handle, "ncclGetLastError", into.get_last_error, missing);
    resolve(handle, "ncclAllReduce", into.all_reduce, missing);
    resolve(handle, "ncclReduceScatter", into.reduce_scatter, missing);
    resolve(handle, "ncclAllGather", into.all_gather, missing);
    resolve(handle, "ncclBroadcast", into.broadcast, missing);
    resolve(handle, "ncclReduce", into.reduce, missing);
    resolve(handle, "ncclSend", into.send, missing);
    resolve(handle, "ncclRecv", into.recv, missing);
    resolve(handle, "ncclGroupStart", into.group_start, missing);
    resolve(handle, "ncclGroupEnd", into.group_end, missing);
    std::string newer;
    resolve(handle, "ncclMemAlloc", into.mem_alloc, newer);
    resolve(handle, "ncclMemFree", into.mem_free, newer);
    resolve(handle, "ncclCommRegister", into.comm_register, newer);
    resolve(handle, "ncclCommDeregister", into.comm_deregister, newer);
    resolve(handle, "ncclCommWindowRegister", into.comm_window_register, newer);
    resolve(handle, "ncclCommWindowDeregister", into.comm_window_deregister, newer);
    return missing;
}

std::string path_of(const Library& library, const std::string& otherwise) {
    Dl_info info;
    bool known = dladdr(reinterpret_cast<void*>(library.get_version), &info) != 0 && info.dli_fname != nullptr;
    return known ? info.dli_fname : otherwise;
}

// Functions that `handle` offers; a DeviceError where some are missing.
Library look_into(void* handle, const std::string& asked_for) {
    Library found;
    std::string missing = resolve_all(handle, found);
    found.path = found.get_version != nullptr ? path_of(found, asked_for) : asked_for;
    if (found.get_version != nullptr) {
        Result result = found.get_version(&found.version_code);
        if (result != kSuccess) {
            throw DeviceError(
                format("NCCL at %s: ncclGetVersion failed: %s", found.path.c_str(), name_of(result).c_str()));
        }
        if (found.version_code < kOldestVersion) {  // reported before `missing`, its consequence
            throw DeviceError(format("NCCL at %s is version %s, wanted 2.14 or newer: %s", found.path.c_str(),
                                     found.version().c_str(), kAdvice));
        }
    }
    if (!missing.empty()) {
        throw DeviceError(format("the library at %s lacks %s: it is not NCCL, or is broken: %s", found.path.c_str(),
                                 missing.c_str(), kAdvice));
    }
    return found;
}

// Closes the library again if it cannot be used.
Library open(const std::string& path, int flags) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
    if (handle == nullptr) throw DeviceError(last_dl_error());
    try {
        return look_into(handle, path);
    } catch (...) {
        dlclose(handle);
        throw;
    }
}

Library find(const std::vector<std::string>& paths) {
    // A copy that the process uses already is taken, or is an error: a second NCCL beside it would hide the problem.
    if (void* loaded = dlopen(kName, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD); loaded != nullptr) {
        dlclose(loaded);
        return open(kName, RTLD_NOLOAD);
    }
    std::vector<std::string> candidates = paths;
    candidates.emplace_back(kName);
    std::string problems;
    for (const std::string& path : candidates) {
        try {
            return open(path, 0);
        } catch (const DeviceError& error) {
            problems += "\n  " + path + ": " + error.what();
        }
    }
    throw DeviceError(std::string("NCCL was not found: ") + kAdvice + ". Tried:" + problems);
}

Library open_named(const std::string& path) {
    struct stat looks;  // the loader would wait for a pipe's other end
    if (path.find('/') != std::string::npos && stat(path.c_str(), &looks) == 0 && !S_ISREG(looks.st_mode)) {
        throw DeviceError(std::string(kLibraryVariable) + " is " + path + ", which is not a regular file");
    }
    try {
        return open(path, 0);
    } catch (const DeviceError& error) {
        throw DeviceError(std::string(kLibraryVariable) + " is " + path + ", which cannot be used: " + error.what());
    }
}

}  // namespace

std::string name_of(Result result) {
    constexpr const char* kNames[] = {"ncclSuccess",       "ncclUnhandledCudaError", "ncclSystemError",
                                      "ncclInternalError", "ncclInvalidArgument",    "ncclInvalidUsage",
                                      "ncclRemoteError",   "ncclInProgress",         "ncclTimeout"};
    auto code = static_cast<int>(result);
    if (code >= 0 && code <= kTimeout) return kNames[code];
    return "ncclResult_t " + std::to_string(code);
}

int code_of(DType dtype) {
    switch (dtype) {
        case DType::kI8:
            return 0;
        case DType::kU8:
            return 1;
        case DType::kI32:
            return 2;
        case DType::kI64:
            return 4;
        case DType::kF16:
            return 6;
        case DType::kF32:
            return 7;
        case DType::kF64:
            return 8;
        case DType::kBF16:
            return 9;
    }
    return -1;
}

int code_of(ReduceOp op) {
    switch (op) {
        case ReduceOp::kSum:
            return 0;
        case ReduceOp::kProduct:
            return 1;
        case ReduceOp::kMax:
            return 2;
        case ReduceOp::kMin:
            return 3;
        case ReduceOp::kMean:
            return 4;
        default:
            throw ArgumentError(format("op is '%s', which NCCL does not have", name_of(op)));
    }
}

std::string Library::version() const { return dotted(version_code); }

std::string Library::why_not_registered(bool symmetric) const {
    bool is_there = symmetric ? comm_window_deregister != nullptr : comm_deregister != nullptr;
    if (is_there && version_code >= (symmetric ? kWindowVersion : kRegisteringVersion)) return "";
    return "NCCL is " + version() + ", wanted " + (symmetric ? "2.29.7" : "2.19") + " or newer";
}

std::string Library::describe(Result result, Comm comm) const {
    const char* meaning = get_error_string(result);
    const char* last = get_last_error(comm);
    std::string text = name_of(result);
    if (meaning != nullptr && *meaning != '\0') text += std::string(" (") + meaning + ")";
    if (last == nullptr) return text;
    std::string detail = last;
    while (!detail.empty() && (detail.back() == '\n' || detail.back() == ' ')) detail.pop_back();
    return detail.empty() ? text : text + ": " + detail;
}

const Library& library(const std::vector<std::string>& paths) {
    static std::mutex mutex;
    static auto* loaded = new std::map<std::string, Library>;  // never destroyed: threads may still be inside
    std::lock_guard lock(mutex);
    const char* named = std::getenv(kLibraryVariable);
    std::string key = named != nullptr ? named : "";
    auto at = loaded->find(key);
    if (at != loaded->end()) return at->second;
    return loaded->emplace(key, key.empty() ? find(paths) : open_named(key)).first->second;
}

void* allocate(const Library& library, int64_t num_bytes) {
    void* memory = nullptr;
    Result result = library.mem_alloc(&memory, static_cast<size_t>(num_bytes));
    if (result == kSuccess) return memory;
    throw DeviceError(format("NCCL %s: ncclMemAlloc of %lld bytes failed: %s", library.version().c_str(),
                             static_cast<long long>(num_bytes), library.describe(result, nullptr).c_str()));
}

UniqueId make_unique_id(const Library& library) {
    UniqueId id = {};
    Result result = library.get_unique_id(&id);
    if (result == kSuccess) return id;
    throw DeviceError(format("NCCL %s: ncclGetUniqueId failed: %s", library.version().c_str(),
                             library.describe(result, nullptr).c_str()));
}

}  // namespace pycomm::nccl
