#include "transport/nccl/group.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/time.h"
#include "device/runtime.h"
#include "transport/process.h"

namespace pycomm {
namespace {

constexpr double kWatchSeconds = 50e-3;
constexpr double kSignalSeconds = 20e-3;
constexpr double kGraceSeconds = 1.0;  // for operations that are on the device when the group is closed

std::chrono::duration<double> seconds(double count) { return std::chrono::duration<double>(count); }

}  // namespace

NcclGroup::NcclGroup(const nccl::Library& library, const nccl::Creation& wanted)
    : library_(library), wanted_(wanted), pid_(getpid()), watch_(new Watch), comm_(nullptr) {
    try {
        comm_ = nccl::create(library, wanted);
    } catch (...) {
        delete watch_;
        throw;
    }
}

NcclGroup::~NcclGroup() {
    if (getpid() != pid_) return;
    try {
        close("it was dropped");
    } catch (const std::exception&) {  // a lock or a thread could not be had; there is nobody to tell
    }
    if (!watch_->thread.joinable()) delete watch_;
}

void NcclGroup::all_reduce(const Buffer& x, ReduceOp op, Stream stream, double timeout) {
    submit({nccl::Kind::kAllReduce, x.data, x.data, x.count, x.dtype, nccl::code_of(op), stream}, timeout);
}

void NcclGroup::reduce_scatter(const Buffer& out, const Buffer& x, ReduceOp op, Stream stream, double timeout) {
    submit({nccl::Kind::kReduceScatter, x.data, out.data, out.count, x.dtype, nccl::code_of(op), stream}, timeout);
}

void NcclGroup::all_gather(const Buffer& out, const Buffer& x, Stream stream, double timeout) {
    submit({nccl::Kind::kAllGather, x.data, out.data, x.count, x.dtype, 0, stream}, timeout);
}

void NcclGroup::broadcast(const Buffer& x, int src, Stream stream, double timeout) {
    submit({nccl::Kind::kBroadcast, x.data, x.data, x.count, x.dtype, src, stream}, timeout);
}

void NcclGroup::send(const Buffer& x, int dst, Stream stream, double timeout) {
    submit({nccl::Kind::kSend, x.data, nullptr, x.count, x.dtype, dst, stream}, timeout);
}

void NcclGroup::recv(const Buffer& x, int src, Stream stream, double timeout) {
    submit({nccl::Kind::kRecv, nullptr, x.data, x.count, x.dtype, src, stream}, timeout);
}

void NcclGroup::group_start() {
    require_own_process(rank(), "group_start", pid_);
    std::lock_guard order(order_);
    {
        std::lock_guard lock(watch_->mutex);
        require_usable("group_start");
    }
    if (group_is_open_) throw ArgumentError("group_start: a group is open already, wanted group_end() first");
    group_is_open_ = true;
    queued_.clear();
}

void NcclGroup::group_end(double timeout) {
    require_own_process(rank(), "group_end", pid_);
    std::lock_guard order(order_);
    if (!group_is_open_) throw ArgumentError("group_end: no group is open, wanted group_start() first");
    group_is_open_ = false;
    if (!queued_.empty()) launch("group", timeout);
}

void NcclGroup::group_abandon() {
    std::lock_guard order(order_);
    group_is_open_ = false;
}

void NcclGroup::submit(const nccl::Operation& operation, double timeout) {
    std::string name = nccl::name_of(operation.kind);
    require_own_process(rank(), name, pid_);
    std::lock_guard order(order_);
    if (!group_is_open_) {
        bool to_peer = operation.kind == nccl::Kind::kSend || operation.kind == nccl::Kind::kRecv;
        if (to_peer && operation.argument == rank()) {
            throw ArgumentError(
                format("%s: rank %d is this rank itself, wanted another, or a group with both the send "
                       "and the recv",
                       name.c_str(), rank()));
        }
        queued_.assign(1, operation);
        return launch(name, timeout);
    }
    if (!queued_.empty() && queued_.front().stream != operation.stream) {
        throw ArgumentError(format("stream is %p, wanted %p as in the first call of this group", operation.stream,
                                   queued_.front().stream));
    }
    queued_.push_back(operation);
}

// Gives NCCL what is queued.
void NcclGroup::launch(const std::string& name, double timeout) {
    double started = monotonic_seconds();
    device::Guard guard(device());
    std::erase_if(queued_,
                  [](const nccl::Operation& operation) { return operation.count == 0; });  // on every rank alike
    const char* function = nullptr;
    nccl::Result result = nccl::kSuccess;
    try {
        std::lock_guard lock(watch_->mutex);
        require_usable(name);
        if (queued_.empty()) return;
        start_watchdog();
        provide_event();
        busy_ = true;
        result = nccl::issue(library_, comm_, queued_, &function);
    } catch (const DeviceError& error) {
        fail(name, started, error.what());
    }
    await(result, function, name, started, timeout);
    track(name, queued_.front().stream, started, timeout);
}

// Until NCCL has got under way what it was given. Only then may an event be recorded behind it.
void NcclGroup::await(nccl::Result result, const char* function, const std::string& name, double started,
                      double timeout) {
    double asked_for_signals = started;
    while (result == nccl::kInProgress) {
        double now = monotonic_seconds();
        if (now - started > timeout) {
            fail(name, started, "timed out: NCCL could not get it under way, a rank is missing or does something else");
        }
        if (now - asked_for_signals > kSignalSeconds) {
            try {
                wanted_.check_signals();
            } catch (...) {
                break_for_good(failure_of(name, started, "interrupted"));
                throw;
            }
            asked_for_signals = now;
        }
        nccl::pause_between_looks(now - started);
        std::lock_guard lock(watch_->mutex);
        require_usable(name);
        nccl::Result asking = library_.comm_get_async_error(comm_, &result);
        if (asking != nccl::kSuccess) result = asking;
    }
    if (result == nccl::kSuccess) return;
    std::string what = library_.describe(result, nullptr);
    fail(name, started, "NCCL " + library_.version() + " failed: " + function + ": " + what);
}

// From here on the watchdog looks after the operation.
void NcclGroup::track(const std::string& name, Stream stream, double started, double timeout) {
    try {
        std::lock_guard lock(watch_->mutex);
        require_usable(name);
        Event event = free_.back();
        device::record(event, stream);
        pending_.push_back({event, name, started, timeout});
        free_.pop_back();
        busy_ = false;
    } catch (const DeviceError& error) {
        fail(name, started, error.what());
    }
    watch_->wake.notify_all();
}

void NcclGroup::start_watchdog() {
    if (watch_->thread.joinable()) return;
    watch_->thread = std::thread([this] {
        try {
            watch();
        } catch (const std::exception&) {  // no memory left to say what is wrong; without a watchdog, check() still can
        }
    });
}

void NcclGroup::watch() {
    device::Guard guard(device());  // or the looks at events would make a context on the first GPU
    std::unique_lock lock(watch_->mutex);
    while (!watch_->stopping) {
        if (pending_.empty()) {
            watch_->wake.wait(lock);
            continue;
        }
        watch_->wake.wait_for(lock, seconds(kWatchSeconds), [this] { return watch_->stopping; });
        if (watch_->stopping) return;
        std::optional<CommFailure> found = inspect();
        if (!found) continue;
        lock.unlock();
        break_for_good(*found);
        lock.lock();
    }
}

void NcclGroup::check() {
    require_own_process(rank(), "check", pid_);
    std::optional<CommFailure> found;
    {
        device::Guard guard(device());
        std::lock_guard lock(watch_->mutex);
        found = failure_ ? failure_ : inspect();
    }
    if (!found) return;
    break_for_good(*found);
    throw *found;
}

void NcclGroup::require_usable(const std::string& name) const {
    if (failure_) throw *failure_;
    if (!closed_) return;
    throw CommFailure(
        rank(), -1, name, 0.0,
        format("rank %d: %s: this communicator is closed (%s)", rank(), name.c_str(), why_closed_.c_str()));
}

void NcclGroup::retire() {
    // Streams differ, so operations need not end in the order in which they began.
    std::erase_if(pending_, [this](const Pending& pending) {
        if (!device::has_happened(pending.event)) return false;
        free_.push_back(pending.event);
        return true;
    });
}

// Sees to it that free_ has one. A caller in a hurry enqueues thousands of operations between two looks of the
// watchdog, so what has happened at the front is taken first.
void NcclGroup::provide_event() {
    while (!pending_.empty() && device::has_happened(pending_.front().event)) {
        free_.push_back(pending_.front().event);
        pending_.pop_front();
    }
    free_.reserve(events_.size() + 1);  // giving events back must not fail
    if (free_.empty()) free_.push_back(events_.emplace_back(device::make_event()));
}

std::optional<CommFailure> NcclGroup::inspect() {
    if (comm_ == nullptr) return std::nullopt;
    double now = monotonic_seconds();
    std::string oldest = pending_.empty() ? "check" : pending_.front().name;
    double since = pending_.empty() ? now : pending_.front().started;
    try {
        nccl::Result state = nccl::kSuccess;
        nccl::Result asking = library_.comm_get_async_error(comm_, &state);
        if (asking != nccl::kSuccess) state = asking;
        if (state != nccl::kSuccess && state != nccl::kInProgress) {  // in progress: await() looks after that
            return failure_of(oldest, since, "NCCL reported " + library_.describe(state, nullptr));
        }
        retire();
        for (const Pending& pending : pending_) {
            if (now - pending.started <= pending.timeout) continue;
            return failure_of(pending.name, pending.started, "timed out on the device");
        }
    } catch (const std::exception& error) {  // the device's own failure: an illegal access of some kernel, say
        return failure_of(oldest, since, error.what());
    }
    return std::nullopt;
}

CommFailure NcclGroup::failure_of(const std::string& name, double started, const std::string& what) const {
    double elapsed = monotonic_seconds() - started;
    std::string text = format("rank %d: %s: ", rank(), name.c_str()) + what + format(" after %.2f s", elapsed) +
                       "; the results of this operation and of those after it are not valid, and this communicator is "
                       "of no further use";
    return {rank(), -1, name, elapsed, text};
}

void NcclGroup::break_for_good(const CommFailure& failure) {
    nccl::Comm comm = nullptr;
    {
        std::lock_guard lock(watch_->mutex);
        if (!failure_) failure_.emplace(failure);  // the first one is the one to tell
        comm = std::exchange(comm_, nullptr);
        pending_.clear();
    }
    if (comm != nullptr) nccl::abort(library_, comm, device());
}

void NcclGroup::fail(const std::string& name, double started, const std::string& what) {
    break_for_good(failure_of(name, started, what));
    std::lock_guard lock(watch_->mutex);
    throw *failure_;
}

void NcclGroup::await_pending(double patience) {
    double started = monotonic_seconds();
    while (monotonic_seconds() - started < patience) {
        {
            std::lock_guard lock(watch_->mutex);
            retire();
            if (pending_.empty() || failure_) return;
        }
        nccl::pause_between_looks(monotonic_seconds() - started);
    }
}

void NcclGroup::close(const std::string& why) {
    if (getpid() != pid_) return;  // a forked child: the parent's communicator is not its to end
    {
        std::lock_guard lock(watch_->mutex);
        if (closed_) return;
        closed_ = true;
        why_closed_ = why;
    }
    try {
        device::Guard guard(device());
        await_pending(kGraceSeconds);
    } catch (const DeviceError&) {  // what is pending now stays so, and is aborted
    }
    nccl::Comm comm = nullptr;
    bool orderly = false;
    {
        std::lock_guard lock(watch_->mutex);
        comm = std::exchange(comm_, nullptr);
        orderly = pending_.empty() && !busy_;
        if (!orderly && !failure_) {
            std::string name = pending_.empty() ? "close" : pending_.front().name;
            double started = pending_.empty() ? monotonic_seconds() : pending_.front().started;
            failure_.emplace(failure_of(name, started, "the communicator was closed (" + why + ") meanwhile"));
        }
        pending_.clear();
        watch_->stopping = true;
    }
    watch_->wake.notify_all();
    if (watch_->thread.joinable()) watch_->thread.join();
    if (comm != nullptr) orderly ? nccl::finish(library_, comm, device()) : nccl::abort(library_, comm, device());
    for (Event event : std::exchange(events_, {})) device::destroy_event(event);
}

}  // namespace pycomm
