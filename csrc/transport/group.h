// What the transports of CPU memory have in common: collectives among all ranks, and messages between two.
//
// All ranks call the same operations in the same order. Before any data is changed, the ranks compare their operations:
// a difference is an ArgumentError on every rank, after which the group works as before. A CommFailure breaks it for
// good. Timeouts are in seconds, and hold for every wait inside an operation.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "kernels/reduce_op.h"
#include "transport/program.h"

namespace pycomm {

// Called by a thread whose wait is not over after a few polls. The bindings let go of the interpreter's lock in it:
// doing so at once takes longer than most waits of small operations.
inline void (*before_long_wait)() = [] {};

// A posted receive. All methods are thread-safe.
class PostedReceive {
   public:
    virtual ~PostedReceive() = default;
    // Returns the sender of the message that the array now holds. Throws ArgumentError if the message has another size;
    // it is consumed nevertheless. After a timeout or a signal the receive remains posted.
    virtual int wait(double timeout) = 0;
    // Whether wait() would return, or throw, at once. Does not throw that error itself.
    virtual bool is_completed() = 0;
    // Withdraws it: nothing more is written to the array. Returns false if it was completed before.
    virtual bool cancel() = 0;
};

inline constexpr int64_t kTagEnd = int64_t{1} << 30;  // tags of messages are smaller

class Group {
   public:
    virtual ~Group() = default;

    virtual int rank() const = 0;
    virtual int size() const = 0;

    // In place.
    virtual void all_reduce(const Buffer& x, ReduceOp op, double timeout) = 0;
    // The same by a program. kMean divides the sums at the end, rounding twice.
    virtual void run(const NamedProgram& program, const Buffer& x, ReduceOp op, double timeout) = 0;
    // Writes the reduction of all ranks' x into rank `root`'s x; the other ranks' x stay unchanged.
    virtual void reduce(const Buffer& x, int root, ReduceOp op, double timeout) = 0;
    // out: part `rank` of the reduction of x; x.count == size * out.count.
    virtual void reduce_scatter(const Buffer& out, const Buffer& x, ReduceOp op, double timeout) = 0;
    // out: the x of all ranks, in order; out.count == size * x.count.
    virtual void all_gather(const Buffer& out, const Buffer& x, double timeout) = 0;
    // Cuts x into one part per rank: part p becomes part `rank` of rank p's out.
    virtual void all_to_all(const Buffer& out, const Buffer& x, double timeout) = 0;
    // One array for each rank, of any type and length: xs[p] goes to rank p, outs[p] comes from it. Several of xs may
    // be the same array. Throws ArgumentError on every rank if an array and its destination differ in length.
    virtual void all_to_all_v(const std::vector<Buffer>& outs, const std::vector<Buffer>& xs, double timeout) = 0;
    // outs[p]: the x of rank p, of any type and length. Errors as for all_to_all_v.
    virtual void all_gather_v(const std::vector<Buffer>& outs, const Buffer& x, double timeout) {
        all_to_all_v(outs, std::vector<Buffer>(outs.size(), x), timeout);
    }
    // out: the reduction of all ranks' xs[rank]. Lengths may differ from rank to rank; errors as for all_to_all_v.
    virtual void reduce_scatter_v(const Buffer& out, const std::vector<Buffer>& xs, ReduceOp op, double timeout) = 0;
    virtual void broadcast(const Buffer& x, int root, double timeout) = 0;
    virtual void barrier(double timeout) = 0;
    // Stands in for an operation that this rank cannot join because its arguments are wrong: the others get an
    // ArgumentError that quotes `reason`. Does not wait for them; the next operation does.
    virtual void refuse(const std::string& reason, double timeout) = 0;

    // Messages, buffered and matched by source and tag. `width`: bytes of an element, for errors. send() returns once x
    // has been copied; ArgumentError if x alone exceeds the limit. src -1: any rank. `keeper` keeps x's memory alive.
    virtual void send(const Buffer& x, int64_t width, int dst, int64_t tag, double timeout) = 0;
    virtual std::unique_ptr<PostedReceive> post_receive(const Buffer& x, int64_t width, int src, int64_t tag,
                                                        std::shared_ptr<void> keeper) = 0;
    virtual int64_t buffer_limit() = 0;
    virtual void set_buffer_limit(int64_t num_bytes) = 0;
    virtual int64_t buffered_bytes() = 0;

    // Idempotent. Peers that wait for this rank, now or later, get a CommFailure that quotes `why`. Called from within
    // an operation of the same thread, it makes that operation fail and takes effect at its end.
    virtual void close(const std::string& why) = 0;
};

}  // namespace pycomm
