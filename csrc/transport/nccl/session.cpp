#include "transport/nccl/session.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include "base/time.h"
#include "device/runtime.h"

namespace pycomm::nccl {
namespace {

constexpr int kAbortsInGroups = 22200;
constexpr double kYieldSeconds = 200e-6;
constexpr double kEagerSeconds = 10e-3;

std::chrono::duration<double> seconds(double count) { return std::chrono::duration<double>(count); }

void run_bounded(const std::shared_ptr<Session>& session, void (Session::*end)(), double patience) {
    auto done = std::make_shared<std::promise<void>>();
    std::future<void> end_of_work = done->get_future();
    // The library is never unloaded, so an abandoned thread can still use it.
    bool under_way = run_apart([session, end, done] {
        try {
            device::Guard guard(session->device());
            (*session.*end)();
        } catch (const std::exception&) {  // the device failed; nothing of the communicator can be saved
        }
        done->set_value();
    });
    if (under_way) end_of_work.wait_for(seconds(patience));  // else: better a leak than a hang
}

}  // namespace

Result Session::state() {
    std::lock_guard lock(asking_);
    Result state = kSuccess;
    Result asking = library_.comm_get_async_error(comm(), &state);
    return asking != kSuccess ? asking : state;
}

void Session::enter() {
    std::lock_guard lock(mutex_);
    inside_ = true;
}

void Session::leave() {
    {
        std::lock_guard lock(mutex_);
        inside_ = false;
    }
    changed_.notify_all();
}

bool Session::await_exit(double at_most) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, seconds(at_most), [this] { return !inside_; });
}

Result Session::settle(Result result) {
    double started = monotonic_seconds();
    while (result == kInProgress && !unwanted_) {
        pause_between_looks(monotonic_seconds() - started);
        result = state();
    }
    return result;
}

void Session::abort() {
    constexpr double kSlice = 3600.0;
    unwanted_ = true;
    bool in_group = comm() != nullptr && library_.version_code >= kAbortsInGroups && !await_exit(0.0);
    if (in_group) {
        library_.group_start();
        library_.comm_abort(comm());
    }
    while (!await_exit(kSlice)) {
    }
    if (in_group) {
        library_.group_end();
    } else if (comm() != nullptr) {
        library_.comm_abort(comm());
    }
}

bool Session::finalize() {
    double started = monotonic_seconds();
    Result result = library_.comm_finalize(comm());
    while (result == kInProgress) {
        double waited = monotonic_seconds() - started;
        if (waited > kPatience / 2) return false;
        pause_between_looks(waited);
        result = state();
    }
    return result == kSuccess;
}

void Session::finish() { finalize() ? library_.comm_destroy(comm()) : library_.comm_abort(comm()); }

bool run_apart(std::function<void()> work) {
    try {
        std::thread([work = std::move(work)] {
            try {
                device::RelaxedCapture relaxed;
                work();
            } catch (const std::exception&) {
            }
        }).detach();
        return true;
    } catch (const std::system_error&) {
        return false;
    }
}

void finish(const std::shared_ptr<Session>& session, double patience) {
    run_bounded(session, &Session::finish, patience);
}

void abort(const std::shared_ptr<Session>& session, double patience) {
    run_bounded(session, &Session::abort, patience);
}

void pause_between_looks(double waited) {
    if (waited < kYieldSeconds) {
        sched_yield();
    } else {
        usleep(waited < kEagerSeconds ? 50 : 1000);
    }
}

}  // namespace pycomm::nccl
