// Collectives between the processes of one host, through memory that all of them have mapped.
//
// Time is counted in steps. Every rank has a clock in its control page and advances it once per step. All ranks take
// the same steps, because the steps follow from the announced operations, which every rank reads. An operation's first
// step announces it: its kind, types, counts, and the offset of its array in the arena (-1: not in the arena). A rank
// compares all announcements before it touches any data, so ranks that disagree all get the same error and can
// continue.
//
// How an all-reduce of n bytes over P ranks is done ("part r" is the r-th of P equal parts, reduced by rank r in rank
// order, so that all ranks hold the same bits and every run gives the same ones):
//   mailbox    n small: the array travels with the announcement. If it is tiny, every rank reduces all of it (1 step),
//              else part r, into every mailbox (2 steps).
//   direct     all arrays in arenas: rank r reads part r of every array and writes the result into every array.
//              2 steps; each input is read once, each output written once.
//   staged     otherwise: arrays pass through cache-sized segments of staging memory, in a pipeline: while segment i
//              is reduced, i + 1 is being staged and i - 1 fetched. Results are written over what was staged.
//              (segments + 2) steps.
// reduce works the same way, but only one rank gets the result; in mailbox mode that rank does all the work. The others
// (reduce_scatter, all_gather, all_to_all, broadcast) publish their input, in place or by segments, and each rank pulls
// what it needs. Collectives with one array per rank are in parts.h.
//
// Every wait ends with an error if a peer died (end-of-file on its socket, or its process is dumping core), if a peer
// gave up, or if the timeout passed. A rank that gives up names the rank that failed, so that all report the same one.
// After that the group is broken for good: the ranks no longer agree on the step.
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
#include "transport/at_fork.h"
#include "transport/group.h"
#include "transport/shared_memory/arena.h"
#include "transport/shared_memory/staging.h"
#include "transport/shared_memory/wait.h"

namespace pycomm {

struct Control;
struct Operation;
class Messages;

// This rank's input for the elements that it reduces itself, if it has not copied that input into the array.
struct OwnPart {
    int64_t begin = 0;           // of the first element
    std::vector<Buffer> pieces;  // consecutive; in the array only at their own place
    int64_t count() const;
};

class SharedMemoryGroup final : public Group, private ForkAware {
   public:
    // peers[p]: the file of rank p; sockets[p]: connected to rank p; both are empty at [rank]. check_signals() is
    // called from time to time by a waiting thread; if it throws, the operation ends with that exception. names[p]: the
    // number of rank p in error messages, for a group that is part of another one; without names, p itself.
    SharedMemoryGroup(int rank, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<Mapping>> peers,
                      std::vector<Descriptor> sockets, std::function<void()> check_signals,
                      std::vector<int> names = {});
    ~SharedMemoryGroup() override;
    SharedMemoryGroup(const SharedMemoryGroup&) = delete;
    SharedMemoryGroup& operator=(const SharedMemoryGroup&) = delete;

    int rank() const override { return rank_; }
    int size() const override { return size_; }

    void all_reduce(const Buffer& x, ReduceOp op, double timeout) override;
    void run(const NamedProgram& program, const Buffer& x, ReduceOp op, double timeout) override;
    void reduce(const Buffer& x, int root, ReduceOp op, double timeout) override;
    void reduce_scatter(const Buffer& out, const Buffer& x, ReduceOp op, double timeout) override;
    void all_gather(const Buffer& out, const Buffer& x, double timeout) override;
    void all_to_all(const Buffer& out, const Buffer& x, double timeout) override;
    void all_to_all_v(const std::vector<Buffer>& outs, const std::vector<Buffer>& xs, double timeout) override;
    void reduce_scatter_v(const Buffer& out, const std::vector<Buffer>& xs, ReduceOp op, double timeout) override;
    void broadcast(const Buffer& x, int root, double timeout) override;
    void barrier(double timeout) override;
    void refuse(const std::string& reason, double timeout) override;

    // Returns the elements that this rank will reduce itself in the next all_reduce of an array like x (floats, in the
    // arena on every rank). No other rank reads this rank's input for those elements, so it may stay outside the array.
    // Empty if that does not pay.
    Range own_share(const Buffer& x);
    // all_reduce with this rank's own part outside the array. Returns the largest magnitude in the own parts of all
    // ranks, NaN if any is NaN: a caller that packs arrays has checked only what it packed.
    float all_reduce_apart(const Buffer& x, const OwnPart& own, ReduceOp op, double timeout);
    // reduce_scatter_v where `pieces`, consecutive, take the place of this rank's xs[rank], which must be `out`; they
    // lie in `out` only at their own place. Returns the largest magnitude in the pieces that lie elsewhere, NaN if any
    // is NaN. Without pieces: reduce_scatter_v.
    float reduce_scatter_apart(const Buffer& out, const std::vector<Buffer>& xs, ReduceOp op, double timeout,
                               const std::vector<Buffer>& pieces);

    void send(const Buffer& x, int64_t width, int dst, int64_t tag, double timeout) override;
    std::unique_ptr<PostedReceive> post_receive(const Buffer& x, int64_t width, int src, int64_t tag,
                                                std::shared_ptr<void> keeper) override;
    int64_t buffer_limit() override;
    void set_buffer_limit(int64_t num_bytes) override;
    int64_t buffered_bytes() override;

    // Makes an operation fail once it has seen a peer's process stopped for `seconds`; by default it fails only at its
    // timeout.
    void give_up_stopped_after(double seconds) { stopped_patience_ = seconds; }

    std::shared_ptr<Arena> arena() const;
    // Offset of an array in this rank's file, -1 if it does not lie there. For operations.
    int64_t offset_of(const Buffer& x) const;
    // The file of rank p, which may be this rank. The mapping stays valid after the group is closed.
    std::shared_ptr<Mapping> mapping(int p) const;

    void close(const std::string& why) override;

   private:
    friend class Call;
    friend class Messages;
    friend class MessageWait;

    char* base(int p) const { return bases_[static_cast<size_t>(p)]; }
    Control& control(int p) const;
    int name_of(int p) const { return p < 0 || names_.empty() ? p : names_[static_cast<size_t>(p)]; }
    void look_at_cores();
    // The root cause of p's end: follows the ranks that each ended because of the next, as they say themselves, to the
    // last one. p itself if p names nobody.
    int cause_of(int p) const;
    void lock_for_operation(std::unique_lock<std::mutex>& lock, const char* name);
    void break_for_good(uint32_t failed_step, int failed_peer, const std::string& why);
    void close_with_lock(const std::string& why);
    void before_fork() override {}
    void after_fork_in_parent() override {}
    void after_fork_in_child() override;

    int rank_, size_;
    std::vector<Descriptor> sockets_;
    std::vector<pid_t> pids_;                      // of the processes at the other ends; 0: unknown
    std::vector<std::shared_ptr<Mapping>> peers_;  // null at [rank]
    std::vector<char*> bases_;                     // start of each mapped file; dangling once closed
    int64_t file_bytes_;
    std::function<void()> check_signals_;
    mutable std::mutex arena_mutex_;     // guards arena_ and peers_, which are read during operations
    std::shared_ptr<Arena> arena_;       // this rank's
    std::mutex mutex_;                   // one operation at a time
    std::atomic<std::thread::id> busy_;  // the thread that holds mutex_ for an operation
    std::atomic<bool> closing_{false};   // ends the operation in progress
    std::atomic<double> stopped_patience_{std::numeric_limits<double>::infinity()};
    // Waits for ranks to begin an operation, and for messages.
    Patience for_others_{100e-6}, for_messages_{100e-6};
    // Waits within an operation, while peers work on our data. Sleeping here would make them wait for us in turn, until
    // all sleep in every step.
    Patience between_steps_{2e-3};
    StagingChoice staging_;             // only rank 0's is used
    std::vector<double> slacks_;        // all ranks', as they announced them for the last large operation
    double slack_ = 0.0;                // this rank's usual wait for others before a large operation, in seconds
    uint32_t clock_ = 0;                // steps this rank has taken
    uint32_t all_reached_ = 0;          // a step that all ranks are known to have taken
    uint32_t num_calls_ = 0;            // announcements made
    std::vector<Operation> announced_;  // all ranks', of the call in progress
    std::vector<int> names_;            // in errors; none: the ranks themselves
    int pid_;
    bool closed_ = false;
    std::string broken_;         // why, once an operation failed
    int failed_peer_ = -1;       // the rank that failed; -1: no other rank
    std::string closed_within_;  // why, if an operation's own thread called close()
    std::unique_ptr<Messages> messages_;
};

// Size of each rank's file in a group of `size`, given the memory of this machine.
int64_t shared_file_bytes(int size);
// A rank's own file.
std::shared_ptr<Arena> make_arena(Descriptor file, int size, int64_t file_bytes);

}  // namespace pycomm
