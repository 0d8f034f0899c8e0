// A stand-in for NCCL on host memory, for ranks that are threads of one process, with switches to make it fail.
//
// It has NCCL's own binary interface (see csrc/transport/nccl/library.h) and computes what NCCL computes. A call
// returns ncclInProgress, and the communicator stays in that state until all ranks have made the matching call: as if
// the results had to be there for an operation to be under way. Using a communicator after its end, or while something
// is in progress, is counted as misuse, which the tests want to be none.
#include <unistd.h>

#include <algorithm>
#include <array>
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

#include "base/half.h"

#ifndef FAKE_VERSION
#define FAKE_VERSION 23003
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using pycomm::BF16;
using pycomm::F16;

enum Result { kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7 };
enum class Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kSend, kRecv };

struct Call {
    Kind kind;
    const void* in;
    void* out;
    size_t count;
    int dtype, argument;
    std::shared_ptr<bool> done = std::make_shared<bool>(false);
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
    bool ready = false, ended = false;
    int polls_left = 0;
    size_t num_rounds = 0;
    std::vector<std::shared_ptr<bool>> undone;
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
};

std::mutex guard;
Switches switches;
std::map<std::array<char, 128>, World> worlds;
std::vector<std::unique_ptr<FakeComm>> comms;  // never freed, so that their misuse shows
std::string calls_made, algorithms_seen;
int aborts = 0, destroys = 0, misuses = 0, ids = 0;
thread_local int group_depth = 0;
thread_local std::vector<std::pair<FakeComm*, Call>> grouped;

int enter(const char* function, const FakeComm* comm) {
    calls_made += std::string(calls_made.empty() ? "" : " ") + function;
    if (comm != nullptr && comm->ended) ++misuses;
    auto at = switches.failures.find(function);
    return at == switches.failures.end() ? kSuccess : at->second;
}

size_t size_of(int dtype) {
    constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return kSizes[dtype];
}

template <class T>
double widen(T x) {
    return static_cast<double>(x);
}
double widen(F16 x) { return pycomm::to_float(x); }
double widen(BF16 x) { return pycomm::to_float(x); }
template <class T>
T narrow(double x) {
    return static_cast<T>(x);
}
template <>
F16 narrow(double x) {
    return pycomm::to_f16(static_cast<float>(x));
}
template <>
BF16 narrow(double x) {
    return pycomm::to_bf16(static_cast<float>(x));
}

// The reduction of elements [begin, begin + count) of all inputs. In double: the tests' values are small integers.
template <class T>
std::vector<char> reduced_as(const std::vector<const void*>& inputs, size_t begin, size_t count, int op) {
    std::vector<char> bytes(count * sizeof(T));
    auto out = reinterpret_cast<T*>(bytes.data());
    for (size_t i = 0; i < count; ++i) {
        double value = 0;
        for (size_t p = 0; p < inputs.size(); ++p) {
            double x = widen(static_cast<const T*>(inputs[p])[begin + i]);
            if (p == 0)
                value = x;
            else
                value = op == 2 ? std::max(value, x) : op == 3 ? std::min(value, x) : value + x;
        }
        out[i] = narrow<T>(op == 4 ? value / static_cast<double>(inputs.size()) : value);
    }
    return bytes;
}

std::vector<char> reduced(const std::vector<const void*>& inputs, size_t begin, size_t count, int dtype, int op) {
    switch (dtype) {
        case 0:
            return reduced_as<int8_t>(inputs, begin, count, op);
        case 1:
            return reduced_as<uint8_t>(inputs, begin, count, op);
        case 2:
            return reduced_as<int32_t>(inputs, begin, count, op);
        case 4:
            return reduced_as<int64_t>(inputs, begin, count, op);
        case 6:
            return reduced_as<F16>(inputs, begin, count, op);
        case 7:
            return reduced_as<float>(inputs, begin, count, op);
        case 8:
            return reduced_as<double>(inputs, begin, count, op);
        default:
            return reduced_as<BF16>(inputs, begin, count, op);
    }
}

// All of a round's inputs are read before anything is written: a rank's output may be its input.
void compute(const World& world, Round& round) {
    const Call& first = round.calls.at(0);
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
        std::memcpy(call.out, result.data(), result.size());
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
    size_t number = comm->num_rounds++;
    if (world.rounds.size() <= number) world.rounds.resize(number + 1);
    Round& round = world.rounds[number];
    round.calls.emplace(comm->rank, call);
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
    }
    std::erase_if(comm->undone, [](const auto& done) { return *done; });
    if (!comm->undone.empty() || comm->polls_left-- > 0) return kInProgress;
    return kSuccess;
}

int collective(const char* function, void* handle, const Call& call) {
    std::lock_guard lock(guard);
    auto comm = static_cast<FakeComm*>(handle);
    if (int failure = enter(function, comm); failure != kSuccess) return failure;
    if (comm->ended || !comm->ready || !comm->undone.empty()) {
        ++misuses;
        return kInvalidArgument;
    }
    if (group_depth > 0) {
        grouped.emplace_back(comm, call);
        return kSuccess;
    }
    submit(comm, call);
    return state_of(comm);
}

int end(const char* function, void* handle, int& counter) {
    std::lock_guard lock(guard);
    auto comm = static_cast<FakeComm*>(handle);
    int failure = enter(function, comm);
    if (group_depth > 0) ++misuses;  // it would only be collected
    comm->ended = true;
    ++counter;
    return failure;
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
    std::lock_guard lock(guard);
    if (int failure = enter("ncclCommInitRankConfig", nullptr); failure != kSuccess) return failure;
    bool understood = config->size == 24 && config->magic == 0xcafebeef && config->version == 21400;
    if (!understood || config->blocking != 0 || rank < 0 || rank >= size) return kInvalidArgument;
    World& world = worlds[id.bytes];
    world.size = size;
    ++world.joined;
    comms.push_back(std::make_unique<FakeComm>());
    comms.back()->world = &world;
    comms.back()->rank = rank;
    comms.back()->polls_left = switches.polls;
    *handle = comms.back().get();
    return state_of(comms.back().get());
}
EXPORT int ncclCommGetAsyncError(void* handle, int* state) {
    std::lock_guard lock(guard);
    auto comm = static_cast<FakeComm*>(handle);
    if (comm->ended) ++misuses;
    *state = state_of(comm);
    auto at = switches.failures.find("ncclCommGetAsyncError");
    return at == switches.failures.end() ? kSuccess : at->second;
}
EXPORT int ncclCommFinalize(void* handle) {
    std::lock_guard lock(guard);
    auto comm = static_cast<FakeComm*>(handle);
    if (int failure = enter("ncclCommFinalize", comm); failure != kSuccess) return failure;
    comm->polls_left = switches.polls;
    return state_of(comm);
}
EXPORT int ncclCommDestroy(void* handle) { return end("ncclCommDestroy", handle, destroys); }
EXPORT int ncclCommAbort(void* handle) {
    int milliseconds = 0;
    {
        std::lock_guard lock(guard);
        milliseconds = switches.slow_abort_ms;
    }
    usleep(static_cast<useconds_t>(milliseconds) * 1000);
    return end("ncclCommAbort", handle, aborts);
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
EXPORT int ncclSend(const void* in, size_t count, int dtype, int peer, void* comm, void*) {
    return collective("ncclSend", comm, {Kind::kSend, in, nullptr, count, dtype, peer});
}
EXPORT int ncclRecv(void* out, size_t count, int dtype, int peer, void* comm, void*) {
    return collective("ncclRecv", comm, {Kind::kRecv, nullptr, out, count, dtype, peer});
}
EXPORT int ncclGroupStart() {
    std::lock_guard lock(guard);
    int failure = enter("ncclGroupStart", nullptr);
    if (failure == kSuccess) ++group_depth;
    return failure;
}
EXPORT int ncclGroupEnd() {
    std::lock_guard lock(guard);
    --group_depth;
    int failure = enter("ncclGroupEnd", nullptr);
    auto calls = std::exchange(grouped, {});
    if (failure != kSuccess) return failure;
    for (auto& [comm, call] : calls) submit(comm, call);
    return calls.empty() ? kSuccess : kInProgress;
}

// The switches. Everything is as in the beginning after fake_reset(); communicators that exist go on.
EXPORT void fake_reset() {
    std::lock_guard lock(guard);
    switches = {};
    calls_made.clear();
    algorithms_seen.clear();
    aborts = destroys = misuses = 0;
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
EXPORT int fake_aborts() {
    std::lock_guard lock(guard);
    return aborts;
}
EXPORT int fake_destroys() {
    std::lock_guard lock(guard);
    return destroys;
}
EXPORT int fake_misuses() {
    std::lock_guard lock(guard);
    return misuses;
}
// Blank-separated; what getenv("NCCL_ALGO") was when a communicator became ready, "-" for unset.
EXPORT const char* fake_algorithms() { return algorithms_seen.c_str(); }
EXPORT const char* fake_calls() { return calls_made.c_str(); }
