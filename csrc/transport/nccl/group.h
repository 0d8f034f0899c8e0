// Collectives between GPUs, by NCCL, on streams.
//
// An operation is enqueued on the caller's stream, and the call returns. For the first operation of a kind NCCL
// connects to its peers and waits for them inside the call. So an operation of a new kind is issued in a thread of its
// own; the caller continues once NCCL has accepted it, the timeout has passed or Ctrl-C was pressed. All others are
// issued directly. An event is recorded after each operation. While events are outstanding or a thread is inside NCCL,
// a watchdog thread checks every 50 ms whether NCCL reports an error and whether anything is older than its timeout.
//
// After any failure the group is broken for good: the communicator is aborted, once, which also ends all waits on the
// device and inside NCCL. Every later call throws the CommFailure of the first failure. Data that operations wrote
// since then is invalid, so callers must call check() after they synchronized and before they use results.
//
// An operation on a stream that is captured into a CUDA graph becomes part of the graph. The watchdog ignores it: its
// event would never happen, and a graph may be launched at any time.
//
// Locks: order_ is held through an operation, until NCCL has accepted it. The watch's mutex is held only briefly, never
// while a call issues to NCCL or aborts. The thread that takes session_ out of the group ends it.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
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

    // Buffers lie on device() and must stay valid until the stream has completed the operation. timeout: seconds from
    // now until then. ReduceOp::kMean is for floating types. NCCL defines how sums and means of half types are rounded.
    // Throws DeviceError if the stream is captured and no operation of this kind came before.
    void all_reduce(const Buffer& x, ReduceOp op, Stream stream, double timeout);  // in place
    // out: part rank() of the reduction of x; x.count == size() * out.count.
    void reduce_scatter(const Buffer& out, const Buffer& x, ReduceOp op, Stream stream, double timeout);
    // out: the x of all ranks, in order; out.count == size() * x.count.
    void all_gather(const Buffer& out, const Buffer& x, Stream stream, double timeout);
    void broadcast(const Buffer& x, int src, Stream stream, double timeout);
    void reduce(const Buffer& x, int dst, ReduceOp op, Stream stream, double timeout);  // in place, on rank dst only
    // Between two ranks; to oneself only in a group.
    void send(const Buffer& x, int dst, Stream stream, double timeout);
    void recv(const Buffer& x, int src, Stream stream, double timeout);

    // Lets NCCL read and write `memory`, from nccl::allocate(), where it lies. Collective if it is to be a `symmetric`
    // window, of equal size on all ranks. NCCL requires that in an operation all ranks pass registered memory, at equal
    // offsets, or none does. A failure breaks the group.
    void register_memory(void* memory, int64_t num_bytes, bool symmetric, double timeout);
    // Before the memory is freed. Does nothing for memory that is not registered, and once the group is closed or
    // broken. NCCL gives windows places in one space of addresses, the same on all ranks: all must register and
    // deregister them in one order.
    void deregister_memory(void* memory);

    // Calls between these two are collected and issued at the end as one operation, for sends and receives that need
    // each other, and collectives that are to begin together. All on one stream, from one thread; their own timeouts
    // are ignored.
    void group_start();
    void group_end(double timeout);
    void group_abandon();  // instead of group_end(): drops the collected calls

    // Looks for failures now, and throws the first one.
    void check();

    // Idempotent, not collective. Operations still on the device have one second to end, and are then aborted.
    void close(const std::string& why);

   private:
    struct Registration {
        void* handle;
        bool symmetric;
    };
    struct Call {
        std::string name;
        double started, timeout;
        bool is_captured = false;
        Event event = nullptr;  // set once NCCL has accepted it; null if it is captured
    };

    void submit(const nccl::Operation& operation, double timeout);
    void launch(const std::string& name, double timeout);
    template <class Function>  // returns function(); a DeviceError breaks the group
    auto or_fail(const Call& call, Function function) -> decltype(function());
    std::shared_ptr<nccl::Session> enter(const std::string& name);
    std::shared_ptr<nccl::Session> begin(const Call& call);
    nccl::Outcome work_apart(const std::shared_ptr<nccl::Session>& session, const Call& call, const nccl::Work& work);
    void require_success(const nccl::Outcome& outcome, const Call& call);
    void track(Call call, Stream stream);
    void start_watchdog();
    void watch();
    void await_pending(double patience);

    // These require the watch's mutex.
    void require_usable(const std::string& name) const;
    void retire();
    void provide_event();
    std::optional<CommFailure> inspect();

    CommFailure failure_of(const std::string& name, double started, const std::string& what) const;
    void break_for_good(const CommFailure& failure);
    [[noreturn]] void fail(const std::string& name, double started, const std::string& what);

    // Allocated apart, so that a forked child can leak it: the child has no such thread, and the locks may stay held.
    struct Watch {
        std::mutex mutex;
        std::condition_variable wake;
        std::thread thread;
        bool stopping = false, idle = false;
    };

    const nccl::Library& library_;
    nccl::Creation wanted_;
    pid_t pid_;

    std::mutex order_;
    std::vector<nccl::Operation> queued_;
    bool group_is_open_ = false;
    std::set<uint64_t> keys_;                   // of operations that NCCL has done
    std::map<void*, Registration> registered_;  // by memory

    Watch* const watch_;
    std::shared_ptr<nccl::Session> session_;  // null once it is being ended
    std::optional<CommFailure> failure_;
    std::optional<Call> inside_;  // the operation being issued
    std::deque<Call> pending_;    // on the device, oldest first
    std::vector<Event> events_;   // all there are
    std::vector<Event> free_;
    bool has_captured_ = false;
    bool closed_ = false;
    std::string why_closed_;
};

}  // namespace pycomm
