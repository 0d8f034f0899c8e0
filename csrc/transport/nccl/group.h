// Collectives between GPUs, by NCCL, on streams.
//
// An operation is enqueued on the caller's stream and the call returns. NCCL's communicator is one that does not block
// (see init.h), so also getting an operation under way, for which NCCL may first connect to its peers, ends at the
// timeout. Behind each operation an event is recorded. While events are outstanding, a thread (the watchdog) looks
// every 50 ms whether NCCL reports an error, and whether an operation is older than its timeout.
//
// After any failure the group is broken for good: the communicator is aborted, once, which also ends what waits on the
// device, and every later call throws the CommFailure that tells of the first failure. Data that operations wrote since
// then is not valid, so a caller asks check() after it synchronised and before it believes its results.
//
// Locks: order_ is held through an operation, until NCCL has it under way. The watch's mutex is held for moments, and
// around every call into NCCL: whoever holds it and takes comm_ away knows that nobody is inside. It is not held while
// NCCL aborts.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "device/stream.h"
#include "transport/nccl/init.h"
#include "transport/nccl/operation.h"

namespace pycomm {

class NcclGroup {
   public:
    // Collective. Throws as nccl::create() does.
    NcclGroup(const nccl::Library& library, const nccl::Creation& wanted);
    ~NcclGroup();
    NcclGroup(const NcclGroup&) = delete;
    NcclGroup& operator=(const NcclGroup&) = delete;

    int rank() const { return wanted_.rank; }
    int size() const { return wanted_.size; }
    int device() const { return wanted_.device; }

    // Buffers lie on device() and stay there until the stream has come past the operation. timeout in seconds, from now
    // until then. ReduceOp::kMean is for floating types. Means and sums of half types are rounded as NCCL does it.
    void all_reduce(const Buffer& x, ReduceOp op, Stream stream, double timeout);  // in place
    // out: part rank() of the reduction of x; x.count == size() * out.count.
    void reduce_scatter(const Buffer& out, const Buffer& x, ReduceOp op, Stream stream, double timeout);
    // out: the x of all ranks, in order; out.count == size() * x.count.
    void all_gather(const Buffer& out, const Buffer& x, Stream stream, double timeout);
    void broadcast(const Buffer& x, int src, Stream stream, double timeout);
    // Between two ranks; to oneself only in a group.
    void send(const Buffer& x, int dst, Stream stream, double timeout);
    void recv(const Buffer& x, int src, Stream stream, double timeout);

    // Calls between these two are collected and given to NCCL at the end, as one operation: sends and receives that
    // need each other. All on one stream; the timeouts in between do not count. One thread's business.
    void group_start();
    void group_end(double timeout);
    void group_abandon();  // instead: nothing of it happens on this rank

    // Looks now, and throws what there is to tell.
    void check();

    // Idempotent, not collective. Operations that are still on the device get a second to end and are aborted then.
    void close(const std::string& why);

   private:
    struct Pending {
        Event event;
        std::string name;
        double started, timeout;
    };

    void submit(const nccl::Operation& operation, double timeout);
    void launch(const std::string& name, double timeout);
    void await(nccl::Result result, const char* function, const std::string& name, double started, double timeout);
    void track(const std::string& name, Stream stream, double started, double timeout);
    void start_watchdog();
    void watch();
    void await_pending(double patience);

    // With the watch's mutex held.
    void require_usable(const std::string& name) const;
    void retire();
    void provide_event();
    std::optional<CommFailure> inspect();

    CommFailure failure_of(const std::string& name, double started, const std::string& what) const;
    void break_for_good(const CommFailure& failure);
    [[noreturn]] void fail(const std::string& name, double started, const std::string& what);

    // Apart, so that a forked child can leave it alone: it has no such thread, and the locks may be held for ever.
    struct Watch {
        std::mutex mutex;
        std::condition_variable wake;
        std::thread thread;
        bool stopping = false;
    };

    const nccl::Library& library_;
    nccl::Creation wanted_;
    pid_t pid_;

    std::mutex order_;
    std::vector<nccl::Operation> queued_;
    bool group_is_open_ = false;

    Watch* const watch_;
    nccl::Comm comm_;  // null once it is being ended
    std::optional<CommFailure> failure_;
    std::deque<Pending> pending_;  // oldest first
    std::vector<Event> events_;    // all there are
    std::vector<Event> free_;
    bool busy_ = false;  // NCCL is getting an operation under way
    bool closed_ = false;
    std::string why_closed_;
};

}  // namespace pycomm
