// Collectives between processes of several hosts over TCP.
//
// Every pair of ranks has two connections: one for the data of operations, and one for signs of life, messages, and why
// a rank has left (post.h). The calling thread drives the data connections itself: for small operations waking another
// thread would take longer than all the rest. It tries for as long as such waits usually last, then sleeps in poll().
//
// An operation begins with a frame to every other rank: its number, what is called, and up to 64 KB of the first bytes
// for that rank. Nothing more leaves before all frames have come and say the same. So a late rank's window never fills,
// ranks that disagree all see the same frames and raise the same error, and the group goes on: each knows how many
// bytes of the others to skip.
//
// How an all-reduce of n bytes over P ranks is done ("part r" is the r-th of P equal parts):
//   one round    n small: every rank sends all of it with the frame, and adds in rank order.
//   two rounds   rank r gets part r of every rank, adds it in rank order piece by piece, and sends each piece of the
//                result to all at once, while later pieces come.
//   ring         more than 1 MB, from three ranks on: a program of 2 (P - 1) rounds, see transport/tcp/run.cpp. The
//                order of the sums is fixed by the part.
// All ranks hold the same bits, and every run gives the same ones. The other collectives are the rounds of the second.
//
// Every wait ends with an error if a peer has left or died, if its host has vanished, or if nothing moved for the
// timeout. A rank that gives up tells all others why, and which rank failed, before its connections end. After that the
// group is broken for good.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/parallel.h"
#include "transport/at_fork.h"
#include "transport/group.h"
#include "transport/operation.h"
#include "transport/tcp/link.h"
#include "transport/tcp/post.h"

namespace pycomm {

class TcpGroup final : public Group, private ForkAware {
   public:
    // meeting: a number that all ranks of this group have, and no other group between them. data[p], one or several,
    // and control[p]: connected to rank p, none at [rank]. addresses[p]: of rank p, for errors. dead_after: see post.h.
    // check_signals() is called from time to time by a waiting thread; if it throws, the operation ends with that
    // exception.
    TcpGroup(int rank, uint64_t meeting, std::vector<std::vector<Descriptor>> data, std::vector<Descriptor> control,
             const std::vector<std::string>& addresses, double dead_after, std::function<void()> check_signals);
    ~TcpGroup() override;
    TcpGroup(const TcpGroup&) = delete;
    TcpGroup& operator=(const TcpGroup&) = delete;

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

    // Operations of some of the ranks, in rising order, with this one among them. All ranks call them at the same point
    // of their order, each with the ranks that it belongs to; {rank} alone does nothing.
    void all_reduce_among(const std::vector<int>& members, const Buffer& x, ReduceOp op, double timeout);
    void broadcast_among(const std::vector<int>& members, const Buffer& x, int root, double timeout);
    // Compares what all ranks are about to do, and does nothing.
    void compare(const Operation& operation, double timeout);
    // The same for operations with arrays of any lengths: sends[p] and receives[p] are the bytes that this rank has for
    // rank p, and expects from it. `name`: for errors.
    void compare_parts(const char* name, const Operation& operation, const std::vector<int64_t>& sends,
                       const std::vector<int64_t>& receives, double timeout);
    // Breaks the group because of `cause`, -1: this rank, whose failure was found elsewhere. An operation that another
    // thread is in fails with that.
    void give_up(int cause, const std::string& why);
    // The rank because of which p ended, as p said, at the latest a moment from now; p itself if it said nothing.
    int cause_of_end(int p);

    void send(const Buffer& x, int64_t width, int dst, int64_t tag, double timeout) override;
    std::unique_ptr<PostedReceive> post_receive(const Buffer& x, int64_t width, int src, int64_t tag,
                                                std::shared_ptr<void> keeper) override;
    int64_t buffer_limit() override { return post_->limit(); }
    void set_buffer_limit(int64_t num_bytes) override { post_->set_limit(num_bytes); }
    int64_t buffered_bytes() override { return post_->buffered(); }
    // Bytes of operations, frames included, that have left for each rank.
    std::vector<int64_t> bytes_sent() const;
    // Waits until the messages sent so far can be received without this process.
    void hand_over(double patience) { post_->hand_over(patience); }

    void close(const std::string& why) override;

   private:
    friend class TcpCall;
    class Posted;
    class InMessage;

    const std::string& name_of(int p) const { return names_[static_cast<size_t>(p)]; }
    void lock_for_operation(std::unique_lock<std::mutex>& lock, const char* name);
    void break_for_good(int cause, const std::string& why);
    void close_with_lock(const std::string& why);
    void wake() const;
    bool is_in_message() const;
    std::string closed_within() const;
    std::pair<int, std::string> failure_elsewhere() const;
    void before_fork() override {}
    void after_fork_in_parent() override {}
    void after_fork_in_child() override;

    const int rank_, size_;
    const uint64_t meeting_;
    std::vector<std::string> names_;  // "rank 3 at 10.0.0.7:41233"
    std::function<void()> check_signals_;
    std::vector<Link> links_;
    Descriptor waker_;                   // an eventfd that ends a sleep
    mutable std::mutex mutex_;           // one operation at a time
    std::atomic<std::thread::id> busy_;  // the thread that holds mutex_ for an operation
    std::atomic<bool> closing_{false};   // ends the operation in progress
    double usual_wait_ = 0.0;            // seconds; about the median of waits within operations
    uint64_t num_calls_ = 0;             // the number of the last operation
    // By rank: the operations that this one refused, and whose frame has not been read from there.
    std::vector<std::vector<uint64_t>> to_skip_;
    std::vector<char> scratch_;  // for bytes that are reduced, or skipped
    int pid_;
    bool closed_ = false;
    std::string broken_;    // why, once an operation failed
    int failed_peer_ = -1;  // the rank that failed; -1: no other rank
    std::string refusal_;   // kept until it has left
    mutable std::mutex threads_mutex_;
    std::string closed_within_;                 // why, if a thread called close() within an operation of its own
    std::atomic<bool> gives_up_{false};         // ends the operation in progress
    int cause_elsewhere_ = -1;                  // as give_up() was told, ...
    std::string why_elsewhere_;                 // ... at first
    std::vector<std::thread::id> in_messages_;  // threads that wait for messages
    std::unique_ptr<Post> post_;
};

}  // namespace pycomm
