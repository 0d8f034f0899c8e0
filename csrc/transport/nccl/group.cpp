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
constexpr double kGraceSeconds = 1.0;   // for operations that are on the device when the group is closed
constexpr double kGraphPatience = 0.5;  // NCCL keeps a communicator until no CUDA graph uses it

std::chrono::duration<double> seconds(double count) { return std::chrono::duration<double>(count); }

void work_and_leave(nccl::Session& session, const nccl::Work& work, nccl::Outcome& outcome) {
    try {
        outcome = work(session);
    } catch (const DeviceError&) {  // the outcome says so already
    }
    session.leave();  // after this the waiting thread reads the outcome
}

}  // namespace

NcclGroup::NcclGroup(const nccl::Library& library, const nccl::Creation& wanted)
    : library_(library), wanted_(wanted), pid_(getpid()), watch_(new Watch) {
    try {
        session_ = nccl::create(library, wanted);
    } catch (...) {
        delete watch_;
        throw;
    }
}

NcclGroup::~NcclGroup() {
    if (getpid() != pid_) return;
    try {
        close("it was dropped");
    } catch (const std::exception&) {  // no lock or thread was available; a destructor cannot report it
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

void NcclGroup::reduce(const Buffer& x, int dst, ReduceOp op, Stream stream, double timeout) {
    void* out = dst == rank() ? x.data : nullptr;
    submit({nccl::Kind::kReduce, x.data, out, x.count, x.dtype, nccl::code_of(op), stream, dst}, timeout);
}

void NcclGroup::send(const Buffer& x, int dst, Stream stream, double timeout) {
    submit({nccl::Kind::kSend, x.data, nullptr, x.count, x.dtype, dst, stream}, timeout);
}

void NcclGroup::recv(const Buffer& x, int src, Stream stream, double timeout) {
    submit({nccl::Kind::kRecv, nullptr, x.data, x.count, x.dtype, src, stream}, timeout);
}

void NcclGroup::register_memory(void* memory, int64_t num_bytes, bool symmetric, double timeout) {
    require_own_process(rank(), "register_memory", pid_);
    std::lock_guard order(order_);
    Call call{"register_memory", monotonic_seconds(), timeout};
    device::Guard guard(device());
    std::shared_ptr<nccl::Session> session = or_fail(call, [&] { return begin(call); });
    auto handle = std::make_shared<void*>(nullptr);  // a thread that is abandoned still writes it
    nccl::Outcome outcome = work_apart(session, call, [=](nccl::Session& inside) {
        return nccl::register_memory(inside, memory, num_bytes, symmetric, handle.get());
    });
    require_success(outcome, call);
    registered_[memory] = {*handle, symmetric};
}

void NcclGroup::deregister_memory(void* memory) {
    if (getpid() != pid_) return;
    std::lock_guard order(order_);
    auto at = registered_.find(memory);
    if (at == registered_.end()) return;
    try {
        std::shared_ptr<nccl::Session> session = enter("deregister_memory");
        auto deregister = at->second.symmetric ? library_.comm_window_deregister : library_.comm_deregister;
        session->settle(deregister(session->comm(), at->second.handle));
        session->leave();
    } catch (const CommFailure&) {  // the registration ended with the communicator
    }
    registered_.erase(at);
}

// The session, with this thread inside NCCL.
std::shared_ptr<nccl::Session> NcclGroup::enter(const std::string& name) {
    std::lock_guard lock(watch_->mutex);
    require_usable(name);
    session_->enter();
    return session_;
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

// Issues the queued operations.
void NcclGroup::launch(const std::string& name, double timeout) {
    Call call{name, monotonic_seconds(), timeout};
    device::Guard guard(device());
    std::erase_if(queued_,
                  [](const nccl::Operation& operation) { return operation.count == 0; });  // the same on every rank
    if (queued_.empty()) {
        std::lock_guard lock(watch_->mutex);
        return require_usable(name);
    }
    bool like_earlier = std::all_of(queued_.begin(), queued_.end(), [this](const nccl::Operation& operation) {
        return keys_.count(nccl::key_of(operation)) != 0;
    });
    call.is_captured = or_fail(call, [&] { return device::is_capturing(queued_.front().stream); });
    if (call.is_captured && !like_earlier) {
        throw device::warm_up_wanted(name, "NCCL has not yet connected for such an operation");
    }
    std::shared_ptr<nccl::Session> session = or_fail(call, [&] { return begin(call); });
    nccl::Outcome outcome;
    if (like_earlier) {
        work_and_leave(*session, [this](nccl::Session& inside) { return nccl::issue(inside, queued_); }, outcome);
    } else {
        outcome = work_apart(session, call,
                             [operations = queued_](nccl::Session& inside) { return nccl::issue(inside, operations); });
    }
    require_success(outcome, call);
    for (const nccl::Operation& operation : queued_) keys_.insert(nccl::key_of(operation));
    or_fail(call, [&] { track(call, queued_.front().stream); });
}

template <class Function>
auto NcclGroup::or_fail(const Call& call, Function function) -> decltype(function()) {
    try {
        return function();
    } catch (const DeviceError& error) {
        fail(call.name, call.started, error.what());
    }
}

std::shared_ptr<nccl::Session> NcclGroup::begin(const Call& call) {
    std::shared_ptr<nccl::Session> session;
    bool idle = false;
    {
        std::lock_guard lock(watch_->mutex);
        require_usable(call.name);
        start_watchdog();
        if (!call.is_captured) provide_event();
        inside_ = call;
        session = session_;
        session->enter();
        idle = watch_->idle;
    }
    if (idle) watch_->wake.notify_all();
    return session;
}

nccl::Outcome NcclGroup::work_apart(const std::shared_ptr<nccl::Session>& session, const Call& call,
                                    const nccl::Work& work) {
    auto outcome = std::make_shared<nccl::Outcome>();
    if (!nccl::run_apart([session, outcome, work] { work_and_leave(*session, work, *outcome); })) {
        session->leave();
        fail(call.name, call.started, "no thread could be started");
    }
    while (!session->await_exit(kSignalSeconds)) {
        try {
            wanted_.check_signals();
        } catch (...) {
            break_for_good(failure_of(call.name, call.started, "interrupted"));
            throw;
        }
        std::lock_guard lock(watch_->mutex);
        require_usable(call.name);  // the watchdog ends what takes too long
    }
    return *outcome;
}

void NcclGroup::require_success(const nccl::Outcome& outcome, const Call& call) {
    {
        std::lock_guard lock(watch_->mutex);
        inside_.reset();
        require_usable(call.name);  // aborted by another thread: NCCL's error is only the consequence
    }
    if (outcome.result == nccl::kSuccess) return;
    std::string what = library_.describe(outcome.result, nullptr);
    fail(call.name, call.started, "NCCL " + library_.version() + " failed: " + outcome.function + ": " + what);
}

// From here on the watchdog watches the operation.
void NcclGroup::track(Call call, Stream stream) {
    std::lock_guard lock(watch_->mutex);
    require_usable(call.name);
    if (call.is_captured) {
        has_captured_ = true;
        return;
    }
    call.event = free_.back();
    device::record(call.event, stream);
    free_.pop_back();
    pending_.push_back(std::move(call));
}

void NcclGroup::start_watchdog() {
    if (watch_->thread.joinable()) return;
    watch_->thread = std::thread([this] {
        try {
            watch();
        } catch (const std::exception&) {  // out of memory; check() can still report the failure
        }
    });
}

void NcclGroup::watch() {
    device::Guard guard(device());  // otherwise querying events would create a context on GPU 0
    std::unique_lock lock(watch_->mutex);
    while (!watch_->stopping) {
        if (pending_.empty() && !inside_) {
            watch_->idle = true;
            watch_->wake.wait(lock);
            watch_->idle = false;
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
    device::RelaxedCapture relaxed;
    // Streams differ, so operations need not end in the order in which they began.
    std::erase_if(pending_, [this](const Call& pending) {
        if (!device::has_happened(pending.event)) return false;
        free_.push_back(pending.event);
        return true;
    });
}

// Ensures that free_ has an event. A caller may enqueue thousands of operations between two looks of the watchdog, so
// events at the front that have happened are reused first.
void NcclGroup::provide_event() {
    device::RelaxedCapture relaxed;
    while (!pending_.empty() && device::has_happened(pending_.front().event)) {
        free_.push_back(pending_.front().event);
        pending_.pop_front();
    }
    free_.reserve(events_.size() + 1);  // giving events back must not fail
    if (free_.empty()) free_.push_back(events_.emplace_back(device::make_event()));
}

std::optional<CommFailure> NcclGroup::inspect() {
    if (!session_) return std::nullopt;
    double now = monotonic_seconds();
    const Call* oldest = !pending_.empty() ? &pending_.front() : inside_ ? &*inside_ : nullptr;
    std::string name = oldest != nullptr ? oldest->name : "check";
    double since = oldest != nullptr ? oldest->started : now;
    try {
        nccl::Result state = session_->state();
        if (state != nccl::kSuccess && state != nccl::kInProgress) {
            return failure_of(name, since, "NCCL reported " + library_.describe(state, nullptr));
        }
        retire();
        for (const Call& pending : pending_) {
            if (now - pending.started <= pending.timeout) continue;
            return failure_of(pending.name, pending.started, "timed out on the device");
        }
        if (inside_ && now - inside_->started > inside_->timeout) {
            return failure_of(inside_->name, inside_->started,
                              "timed out: NCCL could not start it: a rank is missing or calls something else");
        }
    } catch (const std::exception& error) {  // the device's own failure: an illegal access of some kernel, say
        return failure_of(name, since, error.what());
    }
    return std::nullopt;
}

CommFailure NcclGroup::failure_of(const std::string& name, double started, const std::string& what) const {
    double elapsed = monotonic_seconds() - started;
    std::string text = format("rank %d: %s: ", rank(), name.c_str()) + what + format(" after %.2f s", elapsed) +
                       "; the results of this and of later operations are not valid, and this communicator cannot be "
                       "used again";
    return {rank(), -1, name, elapsed, text};
}

void NcclGroup::break_for_good(const CommFailure& failure) {
    std::shared_ptr<nccl::Session> session;
    {
        std::lock_guard lock(watch_->mutex);
        if (!failure_) failure_.emplace(failure);  // the first one is the one to report
        session = std::exchange(session_, nullptr);
        pending_.clear();
        inside_.reset();
    }
    if (session) nccl::abort(session);
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
    if (getpid() != pid_) return;  // a forked child must not end its parent's communicator
    {
        std::lock_guard lock(watch_->mutex);
        if (closed_) return;
        closed_ = true;
        why_closed_ = why;
    }
    try {
        device::Guard guard(device());
        await_pending(kGraceSeconds);
    } catch (const DeviceError&) {  // pending operations will not end, and are aborted below
    }
    std::shared_ptr<nccl::Session> session;
    bool orderly = false;
    {
        std::lock_guard lock(watch_->mutex);
        session = std::exchange(session_, nullptr);
        orderly = pending_.empty() && !inside_;
        if (!orderly && !failure_) {
            const Call& oldest = pending_.empty() ? *inside_ : pending_.front();
            std::string what = "the communicator was closed (" + why + ") meanwhile";
            failure_.emplace(failure_of(oldest.name, oldest.started, what));
        }
        pending_.clear();
        inside_.reset();
        watch_->stopping = true;
    }
    watch_->wake.notify_all();
    if (watch_->thread.joinable()) watch_->thread.join();
    double patience = has_captured_ ? kGraphPatience : nccl::kPatience;
    if (session) orderly ? nccl::finish(session, patience) : nccl::abort(session, patience);
    for (Event event : std::exchange(events_, {})) device::destroy_event(event);
}

}  // namespace pycomm
