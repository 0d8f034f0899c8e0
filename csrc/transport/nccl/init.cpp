#include "transport/nccl/init.h"

#include <stdlib.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/time.h"
#include "device/runtime.h"

namespace pycomm::nccl {
namespace {

constexpr const char* kOperation = "creating the NCCL communicator";
constexpr const char* kVariable = "NCCL_ALGO";
constexpr int kBlockingVersion = 22200;
constexpr double kSliceSeconds = 20e-3;

[[noreturn]] void fail(const Creation& wanted, double started, const std::string& what) {
    double elapsed = monotonic_seconds() - started;
    std::string text = format("rank %d: %s: ", wanted.rank, kOperation) + what + format(" after %.2f s", elapsed);
    throw CommFailure(wanted.rank, -1, kOperation, elapsed, text);
}

// Communicators are created with NCCL_ALGO=Ring or with the user's value. Several creations of one kind may run at once
// (the ranks of one communicator can be threads of this process, which wait for each other), but never of both kinds.
struct Turns {
    std::mutex mutex;
    std::condition_variable changed;
    int under_way[2] = {0, 0};  // by `ring`
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
            lock.unlock();  // check_signals takes the interpreter's lock, which other waiters may hold
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

// Runs in a thread of its own, which continues after create() has given up.
struct Attempt {
    Attempt(const Library& library, const Creation& wanted)
        : rank(wanted.rank), size(wanted.size), id(wanted.id), session(library, wanted.device) {
        config.blocking = library.version_code >= kBlockingVersion;
    }
    void make() {
        try {
            device::Guard guard(session.device());
            result = session.nccl().comm_init_rank_config(session.place(), size, id, rank, &config);
            result = session.settle(result);
        } catch (...) {
            failure = std::current_exception();
        }
        session.leave();
    }

    const int rank, size;
    const UniqueId id;
    Config config;
    Session session;
    Result result = kInProgress;
    std::exception_ptr failure;
};

void await_made(Attempt& attempt, const Creation& wanted, double started) {
    while (!attempt.session.await_exit(kSliceSeconds)) {
        if (monotonic_seconds() - started > wanted.timeout) {
            fail(wanted, started, format("timed out waiting for all %d ranks", wanted.size));
        }
        wanted.check_signals();
    }
    if (attempt.failure) std::rethrow_exception(attempt.failure);
    if (attempt.result == kSuccess) return;
    const Library& library = attempt.session.nccl();
    fail(wanted, started,
         "NCCL " + library.version() +
             " failed: ncclCommInitRankConfig: " + library.describe(attempt.result, attempt.session.comm()));
}

}  // namespace

std::shared_ptr<Session> create(const Library& library, const Creation& wanted) {
    double started = monotonic_seconds();
    Turn turn(wanted, started);
    auto attempt = std::make_shared<Attempt>(library, wanted);
    std::shared_ptr<Session> session(attempt, &attempt->session);
    session->enter();
    if (!run_apart([attempt] { attempt->make(); })) fail(wanted, started, "no thread could be started");
    try {
        await_made(*attempt, wanted, started);
    } catch (...) {
        abort(session);
        throw;
    }
    return session;
}

}  // namespace pycomm::nccl
