// A communicator, the one thread that may be inside NCCL with it, and its end.
//
// A call into NCCL may wait for other ranks: the creation always does, an operation does if NCCL connects to its peers
// first. So such calls run in threads of their own (run_apart). If NCCL never returns, the thread is abandoned: nothing
// joins it, not even the end of the process.
//
// NCCL allows ncclCommAbort only while no thread is inside it with that communicator; yet nothing else ends a call that
// waits. Since 2.22, within an open group, it raises the abort flag at once, which ends all waits, and does the rest at
// the end of the group. So: abort in an open group, wait until the thread is out, end the group. With older versions,
// communicators are created with blocking = 0: then no call waits for other ranks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "transport/nccl/library.h"

namespace pycomm::nccl {

class Session {
   public:
    Session(const Library& library, int device) : library_(library), device_(device) {}
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    const Library& nccl() const { return library_; }
    int device() const { return device_; }
    Comm comm() const { return std::atomic_ref(comm_).load(); }  // null until NCCL has begun to make it
    Comm* place() { return &comm_; }                             // where NCCL writes it

    // The state that ncclCommGetAsyncError reports, or the error of that call itself.
    Result state();

    // A thread is inside NCCL from enter() to leave().
    void enter();
    void leave();
    // Waits at most `seconds` until no thread is inside; returns whether that is so.
    bool await_exit(double seconds);
    // Called by the thread inside with the result of a call. Waits while it is in progress; returns the final result.
    Result settle(Result result);

    // The last call is one of these two, once. finish() ends a communicator that works and has nothing left to do.
    void finish();
    // Ends the communicator, its operations on the device, and the calls that are inside NCCL.
    void abort();

   private:
    bool finalize();

    const Library& library_;
    const int device_;
    mutable Comm comm_ = nullptr;
    std::mutex asking_;  // with blocking = 0, asking for the state has side effects
    std::mutex mutex_;
    std::condition_variable changed_;
    bool inside_ = false;
    std::atomic<bool> unwanted_ = false;
};

// Runs `work` in a detached thread that does not disturb captures of CUDA graphs; returns false if no thread can be
// started. What `work` throws is dropped.
bool run_apart(std::function<void()> work);

// Run Session::finish() and abort() in a thread. If NCCL does not return within `patience` seconds, the thread is
// abandoned with what it holds: a process must be able to end although a GPU hangs. Neither throws.
inline constexpr double kPatience = 10.0;
void finish(const std::shared_ptr<Session>& session, double patience = kPatience);
void abort(const std::shared_ptr<Session>& session, double patience = kPatience);

// Pauses between two looks at what NCCL does, `waited` seconds after the first one: briefly at first, at most 1 ms.
void pause_between_looks(double waited);

}  // namespace pycomm::nccl
