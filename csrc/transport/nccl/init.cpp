#include "transport/nccl/init.h"

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "base/time.h"
#include "device/runtime.h"

namespace pycomm::nccl {
namespace {

constexpr const char* kOperation = "creating the NCCL communicator";
constexpr const char* kVariable = "NCCL_ALGO";
constexpr double kYieldSeconds = 200e-6;
constexpr double kEagerSeconds = 10e-3;
constexpr double kSliceSeconds = 20e-3;
constexpr double kPatience = 10.0;  // with NCCL while it ends a communicator

[[noreturn]] void fail(const Creation& wanted, double started, const std::string& what) {
    double elapsed = monotonic_seconds() - started;
    std::string text = format("rank %d: %s: ", wanted.rank, kOperation) + what + format(" after %.2f s", elapsed);
    throw CommFailure(wanted.rank, -1, kOperation, elapsed, text);
}

// Communicators are made with NCCL_ALGO=Ring or as the user has it; several of one kind may be under way at once (the
// ranks of one communicator can be threads of this process, which wait for each other), never of both.
struct Turns {
    std::mutex mutex;
    std::condition_variable changed;
    int under_way[2] = {0, 0};  // by whether they want the ring
    std::optional<std::string> before;

    static Turns& instance() {
        static auto* turns = new Turns;  // never destroyed: threads may still be inside
        return *turns;
    }
};

class Turn {
   public:
    Turn(const Creation& wanted, double started) : turns_(Turns::instance()), ring_(wanted.ring) {
        std::unique_lock lock(turns_.mutex);
        while (turns_.under_way[!ring_] > 0) {
            turns_.changed.wait_for(lock, std::chrono::duration<double>(kSliceSeconds));
            if (monotonic_seconds() - started > wanted.timeout) {
                fail(wanted, started, "timed out waiting for a communicator with another algorithm in this process");
            }
            lock.unlock();  // before the interpreter is entered, which other waiters may hold
            wanted.check_signals();
            lock.lock();
        }
        if (++turns_.under_way[ring_] == 1 && ring_) {
            const char* value = getenv(kVariable);
            turns_.before = value != nullptr ? std::optional<std::string>(value) : std::nullopt;
            setenv(kVariable, "Ring", 1);
        }
    }
    ~Turn() {
        std::lock_guard lock(turns_.mutex);
        if (--turns_.under_way[ring_] == 0) {
            if (ring_ && turns_.before) setenv(kVariable, turns_.before->c_str(), 1);
            if (ring_ && !turns_.before) unsetenv(kVariable);
            turns_.changed.notify_all();
        }
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Turns& turns_;
    bool ring_;
};

// Until the communicator is made, or NCCL failed, or the time is over.
Result await_ready(const Library& library, const Creation& wanted, Comm comm, double started) {
    Result state = kInProgress;
    double asked_for_signals = started;
    while (true) {
        Result result = library.comm_get_async_error(comm, &state);
        if (result != kSuccess) return result;
        if (state != kInProgress) return state;
        double now = monotonic_seconds();
        if (now - started > wanted.timeout) {
            fail(wanted, started, format("timed out waiting for all %d ranks", wanted.size));
        }
        if (now - asked_for_signals > kSliceSeconds) {
            wanted.check_signals();
            asked_for_signals = now;
        }
        pause_between_looks(now - started);
    }
}

void run_bounded(const Library& library, Comm comm, int device, void (*end)(const Library&, Comm)) {
    // The library stays loaded for ever, so a thread that is left behind finds it there.
    auto work = [&library, comm, device, end] {
        try {
            device::Guard guard(device);
            end(library, comm);
        } catch (const std::exception&) {  // the device is gone; nothing of the communicator can be saved
        }
    };
    auto done = std::make_shared<std::promise<void>>();
    std::future<void> end_of_work = done->get_future();
    try {
        std::thread([work, done] {
            work();
            done->set_value();
        }).detach();
    } catch (const std::system_error&) {
        return;  // no thread to be had: better a leak than a hang
    }
    end_of_work.wait_for(std::chrono::duration<double>(kPatience));
}

bool finalize(const Library& library, Comm comm) {
    double started = monotonic_seconds();
    Result state = library.comm_finalize(comm);
    while (state == kInProgress) {
        double waited = monotonic_seconds() - started;
        if (waited > kPatience / 2) return false;
        pause_between_looks(waited);
        if (library.comm_get_async_error(comm, &state) != kSuccess) return false;
    }
    return state == kSuccess;
}

}  // namespace

void pause_between_looks(double waited) {
    if (waited < kYieldSeconds) {
        sched_yield();
    } else {
        usleep(waited < kEagerSeconds ? 50 : 1000);
    }
}

Comm create(const Library& library, const Creation& wanted) {
    double started = monotonic_seconds();
    Turn turn(wanted, started);
    device::Guard guard(wanted.device);
    Config config;
    Comm comm = nullptr;
    Result result = library.comm_init_rank_config(&comm, wanted.size, wanted.id, wanted.rank, &config);
    try {
        if (result == kInProgress) result = await_ready(library, wanted, comm, started);
        if (result != kSuccess) {
            fail(wanted, started,
                 "NCCL " + library.version() + " failed: ncclCommInitRankConfig: " + library.describe(result, comm));
        }
    } catch (...) {
        if (comm != nullptr) abort(library, comm, wanted.device);
        throw;
    }
    return comm;
}

void finish(const Library& library, Comm comm, int device) {
    run_bounded(library, comm, device, [](const Library& nccl, Comm ending) {
        finalize(nccl, ending) ? nccl.comm_destroy(ending) : nccl.comm_abort(ending);
    });
}

void abort(const Library& library, Comm comm, int device) {
    run_bounded(library, comm, device, [](const Library& nccl, Comm ending) { nccl.comm_abort(ending); });
}

}  // namespace pycomm::nccl
