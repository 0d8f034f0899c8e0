// A stand-in for NCCL on host memory, for ranks that are threads of one process, with switches to make it fail.
//
// It has NCCL's own binary interface (see csrc/transport/nccl/library.h) and computes what NCCL computes. A call waits
// until all ranks have made the matching call: as if the results had to be there for an operation to be under way. With
// blocking = 0 it returns ncclInProgress instead, and the communicator stays in that state. ncclCommAbort ends waits;
// inside a group, as in NCCL from 2.22 on, the communicator itself lives until the group ends. Using a communicator
// after its end, while something is in progress or from two threads, and ending one that a thread is inside of, are
// counted as misuse, which the tests want to be none.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fake_sums.h"

#ifndef FAKE_VERSION
#define FAKE_VERSION 23003
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Result { kSuccess = 0, kInternalError = 3, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7 };
enum class Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kSend, kRecv, kReduce, kWindow };

struct Call {
    Kind kind;
    const void* in;
    void* out;
    size_t count;
    int dtype, argument;
    int root = 0;  // of kReduce
    std::shared_ptr<bool> done = std::make_shared<bool>(false);
    std::array<std::pair<size_t, ptrdiff_t>, 2> places = {};  // of in and out: number of the window, and offset
};

struct Window {
    const char* begin;
    size_t bytes, number;  // from 1 on
};

// The ranks' calls number n.
struct Round {
    std::map<int, Call> calls;
};

struct World {
    int size = 0, joined = 0;
    std::deque<Round> rounds;
    std::map<std::pair<int, int>, std::deque<Call>> sends, recvs;  // by (from, to)
};

struct FakeComm {
    World* world = nullptr;
    int rank = 0;
    bool blocking = true, ready = false, aborting = false, ended = false;
    int inside = 0;  // threads that wait in a call
    int polls_left = 0;
    size_t num_rounds = 0;
    std::vector<std::shared_ptr<bool>> undone;
    std::vector<Window*> windows;
    size_t num_windows = 0;
};

struct UniqueId {
    std::array<char, 128> bytes;
};

struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

struct Switches {
    int version = FAKE_VERSION;
    std::map<std::string, int> failures;  // by function: what it returns
    int polls = 0;                        // how often something is in progress before it is done
    bool never_ready = false;
    int async_error = 0;
    int slow_abort_ms = 0;
    bool graph_lives = false;  // then nothing is finalized
    bool deaf = false;         // waits go on after an abort
};

std::mutex guard;
std::condition_variable changed;  // something that a call may wait for
Switches switches;
std::map<std::array<char, 128>, World> worlds;
std::vector<std::unique_ptr<FakeComm>> comms;  // never freed, so that their misuse shows
std::string calls_made, algorithms_seen, modes_seen;
int aborts = 0, destroys = 0, misuses = 0, ids = 0, last_thread = 0, registered_bytes = 0;
thread_local int group_depth = 0, group_error = kSuccess;
thread_local std::vector<std::pair<FakeComm*, Call>> grouped;
thread_local std::vector<FakeComm*> grouped_aborts;

int enter(const char* function, const FakeComm* comm) {
    calls_made += std::string(calls_made.empty() ? "" : " ") + function;
    if (comm != nullptr && comm->ended) ++misuses;
    auto at = switches.failures.find(function);
    return at == switches.failures.end() ? kSuccess : at->second;
}

std::pair<size_t, ptrdiff_t> place_of(const FakeComm* comm, const void* pointer) {
    for (const Window* window : comm->windows) {
        ptrdiff_t offset = static_cast<const char*>(pointer) - window->begin;
        if (offset >= 0 && offset < static_cast<ptrdiff_t>(window->bytes)) return {window->number, offset};
    }
    return {};
}

// All of a round's inputs are read before anything is written: a rank's output may be its input.
void compute(const World& world, Round& round) {
    const Call& first = round.calls.at(0);
    for (auto& [rank, call] : round.calls) {  // symmetric: ranks reach each other's windows by their own addresses
        bool alike = call.kind == first.kind && call.places == first.places;
        if (!alike || (call.kind == Kind::kWindow && call.count != first.count)) ++misuses;
    }
    if (first.kind == Kind::kWindow) {
        for (auto& [rank, call] : round.calls) *call.done = true;
        return;
    }
    std::vector<const void*> inputs;
    for (auto& [rank, call] : round.calls) inputs.push_back(call.in);
    size_t bytes = first.count * size_of(first.dtype);
    std::vector<char> gathered;
    for (const void* input : inputs) {
        if (first.kind != Kind::kAllGather) break;
        gathered.insert(gathered.end(), static_cast<const char*>(input), static_cast<const char*>(input) + bytes);
    }
    std::vector<std::vector<char>> results;
    for (int rank = 0; rank < world.size; ++rank) {
        size_t begin = first.kind == Kind::kReduceScatter ? static_cast<size_t>(rank) * first.count : 0;
        if (first.kind == Kind::kAllGather) {
            results.push_back(gathered);
        } else if (first.kind == Kind::kBroadcast) {
            auto root = static_cast<const char*>(inputs[static_cast<size_t>(first.argument)]);
            results.emplace_back(root, root + bytes);
        } else {
            results.push_back(reduced(inputs, begin, first.count, first.dtype, first.argument));
        }
    }
    for (auto& [rank, call] : round.calls) {
        const std::vector<char>& result = results[static_cast<size_t>(rank)];
        if (first.kind != Kind::kReduce || rank == first.root) std::memcpy(call.out, result.data(), result.size());
        *call.done = true;
    }
}

void exchange(World& world, FakeComm* comm, const Call& call) {
    bool sends = call.kind == Kind::kSend;
    auto key = sends ? std::pair{comm->rank, call.argument} : std::pair{call.argument, comm->rank};
    (sends ? world.sends : world.recvs)[key].push_back(call);
    auto &from = world.sends[key], &to = world.recvs[key];
    while (!from.empty() && !to.empty()) {
        std::memcpy(to.front().out, from.front().in, from.front().count * size_of(from.front().dtype));
        *from.front().done = *to.front().done = true;
        from.pop_front();
        to.pop_front();
    }
}

void submit(FakeComm* comm, const Call& call) {
    World& world = *comm->world;
    comm->undone.push_back(call.done);
    comm->polls_left = switches.polls;
    if (call.kind == Kind::kSend || call.kind == Kind::kRecv) return exchange(world, comm, call);
    Call placed = call;
    placed.places = {place_of(comm, call.in), place_of(comm, call.out)};
    size_t number = comm->num_rounds++;
    if (world.rounds.size() <= number) world.rounds.resize(number + 1);
    Round& round = world.rounds[number];
    round.calls.emplace(comm->rank, placed);
    if (static_cast<int>(round.calls.size()) == world.size) compute(world, round);
}

int state_of(FakeComm* comm) {
    if (switches.async_error != 0) return switches.async_error;
    if (!comm->ready) {
        if (switches.never_ready || comm->world->joined < comm->world->size) return kInProgress;
        if (comm->polls_left-- > 0) return kInProgress;
        const char* algorithm = getenv("NCCL_ALGO");
        algorithms_seen += std::string(algorithms_seen.empty() ? "" : " ") + (algorithm ? algorithm : "-");
        comm->ready = true;
        changed.notify_all();
    }
    std::erase_if(comm->undone, [](const auto& done) { return *done; });
    if (!comm->undone.empty() || comm->polls_left-- > 0) return kInProgress;
    return kSuccess;
}

// What a call returns once it has done its part.
int result_of(std::unique_lock<std::mutex>& lock, FakeComm* comm) {
    changed.notify_all();
    int state = state_of(comm);
    if (!comm->blocking) return state;
    ++comm->inside;
    while (state == kInProgress && (!comm->aborting || switches.deaf)) {
        changed.wait_for(lock, std::chrono::milliseconds(1));  // the switches change things too
        state = state_of(comm);
    }
    --comm->inside;
    changed.notify_all();
    return state == kInProgress ? kInternalError : state;
}

int collective(const char* function, void* handle, const Call& call) {
    std::unique_lock lock(guard);
    last_thread = gettid();
    auto comm = static_cast<FakeComm*>(handle);
    if (int failure = enter(function, comm); failure != kSuccess) return group_error = failure;
    if (comm->ended || !comm->ready || comm->inside > 0 || (!comm->blocking && !comm->undone.empty())) {
        ++misuses;
        return kInvalidArgument;
    }
    if (group_depth > 0) {
        grouped.emplace_back(comm, call);
        return kSuccess;
    }
    submit(comm, call);
    return result_of(lock, comm);
}

void end(FakeComm* comm, int& counter) {
    if (comm->ended || comm->inside > 0) ++misuses;
    comm->ended = true;
    ++counter;
}

}  // namespace

EXPORT int ncclGetVersion(int* version) {
    std::lock_guard lock(guard);
    *version = switches.version;
    return enter("ncclGetVersion", nullptr);
}
EXPORT int ncclGetUniqueId(UniqueId* id) {
    std::lock_guard lock(guard);
    id->bytes = {};
    std::memcpy(id->bytes.data(), &++ids, sizeof ids);
    return enter("ncclGetUniqueId", nullptr);
}
EXPORT int ncclCommInitRankConfig(void** handle, int size, UniqueId id, int rank, const Config* config) {
    std::unique_lock lock(guard);
    if (int failure = enter("ncclCommInitRankConfig", nullptr); failure != kSuccess) return failure;
    bool understood = config->size == 24 && config->magic == 0xcafebeef && config->version == 21400;
    if (!understood || rank < 0 || rank >= size) return kInvalidArgument;
    modes_seen += std::string(modes_seen.empty() ? "" : " ") + (config->blocking != 0 ? "blocking" : "polled");
    World& world = worlds[id.bytes];
    world.size = size;
    ++world.joined;
    comms.push_back(std::make_unique<FakeComm>());
    comms.back()->world = &world;
    comms.back()->rank = rank;
    comms.back()->polls_left = switches.polls;
    const char* overruled = getenv("NCCL_COMM_BLOCKING");
    comms.back()->blocking = overruled != nullptr ? *overruled != '0' : config->blocking != 0;
    __atomic_store_n(handle, comms.back().get(), __ATOMIC_SEQ_CST);  // others look, to abort
    return result_of(lock, comms.back().get());
}
EXPORT int ncclCommGetAsyncError(void* handle, int* state) {
    std::lock_guard lock(guard);
    auto comm = static_cast<FakeComm*>(handle);
    if (comm->ended) ++misuses;
    *state = comm->blocking ? switches.async_error : state_of(comm);
    auto at = switches.failures.find("ncclCommGetAsyncError");
    return at == switches.failures.end() ? kSuccess : at->second;
}
EXPORT int ncclCommFinalize(void* handle) {
    std::unique_lock lock(guard);
    auto comm = static_cast<FakeComm*>(handle);
    if (int failure = enter("ncclCommFinalize", comm); failure != kSuccess) return failure;
    while (switches.graph_lives) changed.wait_for(lock, std::chrono::milliseconds(1));
    comm->polls_left = switches.polls;
    return result_of(lock, comm);
}
EXPORT int ncclCommDestroy(void* handle) {
    std::lock_guard lock(guard);
    auto comm = static_cast<FakeComm*>(handle);
    int failure = enter("ncclCommDestroy", comm);
    if (group_depth > 0) ++misuses;  // it would only be collected
    end(comm, destroys);
    return failure;
}
EXPORT int ncclCommAbort(void* handle) {
    int milliseconds = 0;
    {
        std::lock_guard lock(guard);
        milliseconds = switches.slow_abort_ms;
    }
    usleep(static_cast<useconds_t>(milliseconds) * 1000);
    std::lock_guard lock(guard);
    auto comm = static_cast<FakeComm*>(handle);
    int failure = enter("ncclCommAbort", comm);
    comm->aborting = true;
    changed.notify_all();
    if (group_depth > 0) {
        grouped_aborts.push_back(comm);
    } else {
        end(comm, aborts);
    }
    return failure;
}
EXPORT const char* ncclGetErrorString(int result) { return result == 0 ? "no error" : "what this code means"; }
EXPORT const char* ncclGetLastError(void*) { return "what NCCL wrote down last\n"; }

EXPORT int ncclAllReduce(const void* in, void* out, size_t count, int dtype, int op, void* comm, void*) {
    return collective("ncclAllReduce", comm, {Kind::kAllReduce, in, out, count, dtype, op});
}
#ifndef FAKE_WITHOUT_REDUCE_SCATTER
EXPORT int ncclReduceScatter(const void* in, void* out, size_t count, int dtype, int op, void* comm, void*) {
    return collective("ncclReduceScatter", comm, {Kind::kReduceScatter, in, out, count, dtype, op});
}
#endif
EXPORT int ncclAllGather(const void* in, void* out, size_t count, int dtype, void* comm, void*) {
    return collective("ncclAllGather", comm, {Kind::kAllGather, in, out, count, dtype, 0});
}
EXPORT int ncclBroadcast(const void* in, void* out, size_t count, int dtype, int root, void* comm, void*) {
    return collective("ncclBroadcast", comm, {Kind::kBroadcast, in, out, count, dtype, root});
}
EXPORT int ncclReduce(const void* in, void* out, size_t count, int dtype, int op, int root, void* comm, void*) {
    return collective("ncclReduce", comm, {Kind::kReduce, in, out, count, dtype, op, root});
}
EXPORT int ncclSend(const void* in, size_t count, int dtype, int peer, void* comm, void*) {
    return collective("ncclSend", comm, {Kind::kSend, in, nullptr, count, dtype, peer});
}
EXPORT int ncclRecv(void* out, size_t count, int dtype, int peer, void* comm, void*) {
    return collective("ncclRecv", comm, {Kind::kRecv, nullptr, out, count, dtype, peer});
}
EXPORT int ncclMemAlloc(void** memory, size_t bytes) {
    std::lock_guard lock(guard);
    if (int failure = enter("ncclMemAlloc", nullptr); failure != kSuccess) return failure;
    *memory = std::malloc(bytes);
    return kSuccess;
}
EXPORT int ncclMemFree(void* memory) {
    std::lock_guard lock(guard);
    std::free(memory);
    return enter("ncclMemFree", nullptr);
}
EXPORT int ncclCommRegister(void* handle, void* memory, size_t bytes, void** registration) {
    std::lock_guard lock(guard);
    auto comm = static_cast<FakeComm*>(handle);
    if (int failure = enter("ncclCommRegister", comm); failure != kSuccess) return failure;
    if (comm->ended || !comm->ready || comm->inside > 0) ++misuses;
    *registration = new size_t(bytes);
    registered_bytes += static_cast<int>(bytes);
    return kSuccess;
}
EXPORT int ncclCommDeregister(void* handle, void* registration) {
    std::lock_guard lock(guard);
    auto comm = static_cast<FakeComm*>(handle);
    if (comm->ended) ++misuses;
    auto bytes = static_cast<size_t*>(registration);
    registered_bytes -= static_cast<int>(*bytes);
    delete bytes;
    return enter("ncclCommDeregister", comm);
}
// A collective: it waits for all ranks.
EXPORT int ncclCommWindowRegister(void* handle, void* memory, size_t bytes, void** window, int flags) {
    auto comm = static_cast<FakeComm*>(handle);
    int result = collective("ncclCommWindowRegister", handle, {Kind::kWindow, nullptr, nullptr, bytes, flags, 0});
    if (result != kSuccess) return result;
    std::lock_guard lock(guard);
    comm->windows.push_back(new Window{static_cast<char*>(memory), bytes, ++comm->num_windows});
    registered_bytes += static_cast<int>(bytes);
    if (flags != 1) ++misuses;
    *window = comm->windows.back();
    return kSuccess;
}
EXPORT int ncclCommWindowDeregister(void* handle, void* window) {
    std::lock_guard lock(guard);
    auto comm = static_cast<FakeComm*>(handle);
    auto old = static_cast<Window*>(window);
    if (comm->ended || std::erase(comm->windows, old) != 1) ++misuses;
    registered_bytes -= static_cast<int>(old->bytes);
    delete old;
    return enter("ncclCommWindowDeregister", comm);
}
EXPORT int ncclGroupStart() {
    std::lock_guard lock(guard);
    int failure = enter("ncclGroupStart", nullptr);
    if (failure == kSuccess) ++group_depth;
    group_error = kSuccess;
    return failure;
}
EXPORT int ncclGroupEnd() {
    std::unique_lock lock(guard);
    --group_depth;
    for (FakeComm* comm : std::exchange(grouped_aborts, {})) end(comm, aborts);
    int failure = enter("ncclGroupEnd", nullptr);
    auto calls = std::exchange(grouped, {});
    if (int earlier = std::exchange(group_error, kSuccess); earlier != kSuccess) return earlier;  // none of it happens
    if (failure != kSuccess) return failure;
    for (auto& [comm, call] : calls) submit(comm, call);
    return calls.empty() ? kSuccess : result_of(lock, calls.front().first);
}

// The switches. Everything is as in the beginning after fake_reset(); communicators that exist go on.
EXPORT void fake_reset() {
    std::lock_guard lock(guard);
    switches = {};
    calls_made.clear();
    algorithms_seen.clear();
    modes_seen.clear();
    aborts = destroys = misuses = registered_bytes = 0;
}
EXPORT void fake_version(int version) {
    std::lock_guard lock(guard);
    switches.version = version;
}
EXPORT void fake_fail(const char* function, int result) {
    std::lock_guard lock(guard);
    switches.failures[function] = result;
}
EXPORT void fake_in_progress(int polls) {
    std::lock_guard lock(guard);
    switches.polls = polls;
}
EXPORT void fake_never_ready(int on) {
    std::lock_guard lock(guard);
    switches.never_ready = on != 0;
}
EXPORT void fake_async_error(int result) {
    std::lock_guard lock(guard);
    switches.async_error = result;
}
EXPORT void fake_slow_abort(int milliseconds) {
    std::lock_guard lock(guard);
    switches.slow_abort_ms = milliseconds;
}
EXPORT void fake_graph_lives(int on) {
    std::lock_guard lock(guard);
    switches.graph_lives = on != 0;
}
EXPORT void fake_deaf(int on) {
    std::lock_guard lock(guard);
    switches.deaf = on != 0;
}
// The thread that an operation was last called on.
EXPORT int fake_last_thread() {
    std::lock_guard lock(guard);
    return last_thread;
}
EXPORT int fake_aborts() {
    std::lock_guard lock(guard);
    return aborts;
}
EXPORT int fake_destroys() {
    std::lock_guard lock(guard);
    return destroys;
}
EXPORT int fake_registered_bytes() {
    std::lock_guard lock(guard);
    return registered_bytes;
}
EXPORT int fake_misuses() {
    std::lock_guard lock(guard);
    return misuses;
}
// Blank-separated; what getenv("NCCL_ALGO") was when a communicator became ready, "-" for unset.
EXPORT const char* fake_algorithms() { return algorithms_seen.c_str(); }
// Blank-separated: "blocking" or "polled", what each communicator was made to be.
EXPORT const char* fake_modes() { return modes_seen.c_str(); }
EXPORT const char* fake_calls() { return calls_made.c_str(); }
