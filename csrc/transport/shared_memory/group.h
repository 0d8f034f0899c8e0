// Collectives between the processes of one host, through memory that all of them have mapped.
//
// Time is counted in steps. Every rank has a clock in its control page and advances it once per step; all ranks take
// the same steps, because what they do is decided by the operations they announced to one another, which all of them
// read. An operation's first step announces it: its kind, types, counts, and where in the arena its array lies (-1: not
// there). A rank compares all announcements before it touches any data, so ranks that disagree get the same error and
// can go on.
//
// How an all-reduce of n bytes over P ranks is done ("part r" is the r-th of P equal parts, reduced by rank r in rank
// order, so that all ranks hold the same bits and every run gives the same ones):
//   mailbox    n small: the array travels with the announcement; every rank reduces all of it. 1 step.
//   direct     all arrays in arenas: rank r reads part r of every array and writes the result into every array.
//              2 steps; each input is read once, each output written once.
//   staged     otherwise: arrays pass through cache-sized segments of staging memory, in a pipeline: while segment i
//              is reduced, i + 1 is being staged and i - 1 fetched. (segments + 3) steps.
// reduce is the same with one rank for whom the results are; where all fits in mailboxes, that one does everything.
// The others (reduce_scatter, all_gather, all_to_all, broadcast) publish their input, in place or by segments, and
// pull. Those with an array for each rank are in parts.h.
//
// Every wait ends with an error when a peer died (end-of-file on its socket, or a process that dumps its core), gave
// up, or the timeout passed. A rank that gives up names the rank that failed, so that all report the same one. After
// that the group is broken for good: the ranks no longer agree on the step.
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/buffer.h"
#include "base/descriptor.h"
#include "base/parallel.h"
#include "kernels/reduce_op.h"
#include "transport/shared_memory/arena.h"
#include "transport/shared_memory/at_fork.h"
#include "transport/shared_memory/staging.h"
#include "transport/shared_memory/wait.h"

namespace pycomm {

struct Control;
struct Operation;
class Messages;

// What a rank puts in for elements of an array that it is to reduce itself, where it has not copied them into the
// array.
struct OwnPart {
    int64_t begin = 0;           // of the first element
    std::vector<Buffer> pieces;  // one after the other; in the array only where they are at their place
    int64_t count() const;
};

class SharedMemoryGroup final : private ForkAware {
   public:
    // peers[p]: the file of rank p; sockets[p]: connected to rank p; both nothing at [rank]. check_signals() is called
    // now and then while waiting, in the thread that waits; what it throws ends the operation. names[p]: the number by
    // which errors name rank p, for a group that is a part of another one; p itself if there are none.
    SharedMemoryGroup(int rank, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<Mapping>> peers,
                      std::vector<Descriptor> sockets, std::function<void()> check_signals,
                      std::vector<int> names = {});
    ~SharedMemoryGroup();
    SharedMemoryGroup(const SharedMemoryGroup&) = delete;
    SharedMemoryGroup& operator=(const SharedMemoryGroup&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }

    // In place. timeout in seconds, for every wait inside.
    void all_reduce(const Buffer& x, ReduceOp op, double timeout);
    // The elements that this rank will reduce itself in the next all_reduce of an array of floats like x, which lies in
    // an arena as those of all ranks do. It may leave its own part of them elsewhere: nobody else reads that. None
    // where that is not worth while.
    Range own_share(const Buffer& x);
    // The same as all_reduce, with such a part. Returns the largest magnitude in the parts of all ranks, NaN if there
    // is one: who packs arrays has looked at what it packed only.
    float all_reduce_apart(const Buffer& x, const OwnPart& own, ReduceOp op, double timeout);
    // The reduction of all ranks' x becomes that of rank `root`; the others' are left as they are.
    void reduce(const Buffer& x, int root, ReduceOp op, double timeout);
    // out: part `rank` of the reduction of x; x.count == size * out.count.
    void reduce_scatter(const Buffer& out, const Buffer& x, ReduceOp op, double timeout);
    // out: the x of all ranks, in order; out.count == size * x.count.
    void all_gather(const Buffer& out, const Buffer& x, double timeout);
    // Part p of x, of as many as there are ranks, becomes part `rank` of rank p's out.
    void all_to_all(const Buffer& out, const Buffer& x, double timeout);
    // One array for each rank, of any type and length: xs[p] goes to rank p, outs[p] comes from it. Several of xs may
    // be the same array. ArgumentError, on every rank, where an array and what becomes of it have different lengths.
    void all_to_all_v(const std::vector<Buffer>& outs, const std::vector<Buffer>& xs, double timeout);
    // out: the reduction of all ranks' xs[rank]. Arrays of different ranks may have different lengths; errors likewise.
    void reduce_scatter_v(const Buffer& out, const std::vector<Buffer>& xs, ReduceOp op, double timeout);
    void broadcast(const Buffer& x, int root, double timeout);
    void barrier(double timeout);
    // Stands in for an operation that this rank cannot join because its arguments are wrong: the others get an
    // ArgumentError that quotes `reason`. Does not wait for them; the next operation does.
    void refuse(const std::string& reason, double timeout);

    // Messages between two ranks, which need not take part in collectives at the same time.
    Messages& messages() { return *messages_; }

    // Operations fail because of a rank whose process is stopped as soon as they have seen it so for `seconds`; else
    // only at their timeouts.
    void give_up_stopped_after(double seconds) { stopped_patience_ = seconds; }

    std::shared_ptr<Arena> arena() const;
    // Offset of an array in this rank's file, -1 if it does not lie there. For operations.
    int64_t offset_of(const Buffer& x) const;
    // The file of rank p, this one or another. Whoever holds it may use it when the group is closed.
    std::shared_ptr<Mapping> mapping(int p) const;

    // Idempotent. Peers that are waiting for this rank, now or later, get a CommFailure. `why` is quoted to them. From
    // within an operation of this very thread (check_signals() calls signal handlers) it takes effect with the
    // operation's end, which it brings about.
    void close(const std::string& why);

   private:
    friend class Call;
    friend class Messages;
    friend class MessageWait;

    char* base(int p) const { return bases_[static_cast<size_t>(p)]; }
    Control& control(int p) const;
    int name_of(int p) const { return p < 0 || names_.empty() ? p : names_[static_cast<size_t>(p)]; }
    void look_at_cores();
    // The rank whose end made p end, as p says itself; of several, one because of the other, the last. p if none is.
    int cause_of(int p) const;
    void lock_for_operation(std::unique_lock<std::mutex>& lock, const char* name);
    void break_for_good(uint32_t failed_step, int failed_peer, const std::string& why);
    void close_with_lock(const std::string& why);
    void before_fork() override {}
    void after_fork_in_parent() override {}
    void after_fork_in_child() override;

    int rank_, size_;
    std::vector<Descriptor> sockets_;
    std::vector<pid_t> pids_;                      // at the other ends; 0 where that is not known
    std::vector<std::shared_ptr<Mapping>> peers_;  // null at [rank]
    std::vector<char*> bases_;                     // where the files lie; dangling once closed
    int64_t file_bytes_;
    std::function<void()> check_signals_;
    mutable std::mutex arena_mutex_;     // of the pointer, which is asked for during operations
    std::shared_ptr<Arena> arena_;       // this rank's
    std::mutex mutex_;                   // one operation at a time
    std::atomic<std::thread::id> busy_;  // the thread that holds it for an operation
    std::atomic<bool> closing_{false};   // ends the operation in progress
    std::atomic<double> stopped_patience_{std::numeric_limits<double>::infinity()};
    // For ranks to begin an operation, to end a step of it, and for messages.
    Patience for_others_{100e-6}, for_messages_{100e-6};
    // Here somebody works for us: to sleep would make it wait for us in turn, until both sleep in every step.
    Patience between_steps_{2e-3};
    StagingChoice staging_;             // of rank 0
    std::vector<double> slacks_;        // all ranks', as they announced them for the last large operation
    double slack_ = 0.0;                // this rank's usual wait for others before a large operation, in seconds
    uint32_t clock_ = 0;                // steps this rank has taken
    uint32_t num_calls_ = 0;            // announcements made
    std::vector<Operation> announced_;  // all ranks', of the call in progress
    std::vector<int> names_;            // in errors; none: the ranks themselves
    int pid_;
    bool closed_ = false;
    std::string broken_;         // why, once an operation failed
    int failed_peer_ = -1;       // the rank whose failure that was, -1: none, or this rank itself
    std::string closed_within_;  // why, where an operation's own thread has closed
    std::unique_ptr<Messages> messages_;
};

// The size that the files of a group of `size` must have, for a machine with that much memory.
int64_t shared_file_bytes(int size);
// A rank's own file.
std::shared_ptr<Arena> make_arena(Descriptor file, int size, int64_t file_bytes);

}  // namespace pycomm
