// A communicator, the one thread that may be inside NCCL with it, and its end.
//
// A call into NCCL may wait for other ranks: the creation always, an operation where NCCL connects to its peers first.
// So such calls are made in threads of their own (run_apart), which are left behind if NCCL never comes back: nothing
// joins them, not even the end of the process.
//
// NCCL allows ncclCommAbort only where no thread is inside with that communicator, but it is the only way to get one
// out that waits. From 2.22 on, inside a group it raises the abort flag at once, which ends all waits, and leaves the
// rest to the end of the group. So: abort in an open group, wait until the thread is out, end the group. Communicators
// of older versions are made with blocking = 0: then no call waits for other ranks.
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

    // ncclCommGetAsyncError; what this itself returns, if that is an error.
    Result state();

    // A thread is inside NCCL from enter() to leave().
    void enter();
    void leave();
    // Waits until it is out, at most so long; returns whether it is.
    bool await_exit(double seconds);
    // Called by the thread inside, with what a call returned: the result once nothing is in progress any more.
    Result settle(Result result);

    // Each once, and nothing afterwards. Ends it when it works and has nothing left to do.
    void finish();
    // Ends it, with the operations that it has on the device and the calls that are inside NCCL.
    void abort();

   private:
    bool finalize();

    const Library& library_;
    const int device_;
    mutable Comm comm_ = nullptr;
    std::mutex asking_;  // in a communicator with blocking = 0, asking is no mere look
    std::mutex mutex_;
    std::condition_variable changed_;
    bool inside_ = false;
    std::atomic<bool> unwanted_ = false;
};

// Runs `work` in a thread that nobody waits for, and that no capture of a CUDA graph minds; false if there is no thread
// to be had. What `work` throws is dropped.
bool run_apart(std::function<void()> work);

// Session::finish() and abort() in a thread that is left behind, with what it holds, if NCCL does not come back within
// `patience` seconds: a process must be able to end although a GPU hangs. Neither throws.
inline constexpr double kPatience = 10.0;
void finish(const std::shared_ptr<Session>& session, double patience = kPatience);
void abort(const std::shared_ptr<Session>& session, double patience = kPatience);

// Between two looks at something that NCCL does, `waited` seconds after it began: short at first, at most 1 ms.
void pause_between_looks(double waited);

}  // namespace pycomm::nccl
