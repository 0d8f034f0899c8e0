// The control connections of a group: signs of life, why ranks left, and messages. The watch thread reads them at once,
// so that their windows never fill; any thread writes to them without waiting.
//
// What is known of a rank that takes no more part:
//   goodbye    it closed its communicator, and said so
//   abort      it gave up, and named the rank that failed and why
//   died       its connection ended without either
//   vanished   its host acknowledges nothing any more, although there is something to acknowledge
// A process that is merely late, or stopped, keeps its connection: its kernel acknowledges for it.
//
// A message is copied when it is sent, and read into memory of its own when it comes. The bytes of a message count as
// buffered until the receiver says that it was taken.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/descriptor.h"
#include "transport/tcp/watch.h"

namespace pycomm {

// Why a rank takes no more part.
struct Gone {
    int cause;         // the rank that failed first, as far as is known
    bool has_said_so;  // by a goodbye or an abort
    std::string what;
};

// A posted receive of a message.
struct Expected {
    Buffer x;
    int64_t width;  // bytes of an element, for errors
    int src;        // -1: any
    int64_t tag;
    std::shared_ptr<void> keeper;  // dropped by the thread that waits, or by the next one that calls anything
    int source = -1;               // of the message, once it is finished
    bool is_finished = false;
    std::exception_ptr failure = nullptr;  // null if the message was received
};
using ExpectedPtr = std::shared_ptr<Expected>;

class Post final : private WatchedSockets {
   public:
    // sockets[p]: connected to rank p at addresses[p]; none at [rank]. dead_after: seconds without an acknowledgment
    // after which a host counts as gone. news: called by the watch thread when a rank takes no more part.
    Post(int rank, std::vector<Descriptor> sockets, std::vector<std::string> addresses, double dead_after,
         std::function<void()> news);
    ~Post();
    Post(const Post&) = delete;
    Post& operator=(const Post&) = delete;

    // Tells all ranks why this one takes no more part. `cause`: the rank that failed; -1: this one closes. Once.
    void leave(int cause, const std::string& why);
    std::optional<Gone> gone(int p);
    // Whether p's host has vanished: then its data connection says nothing.
    bool has_vanished(int p);
    // Waits for what a rank whose data connection has ended says of that; a second at most.
    Gone end_of(int p);
    // Seconds since p's process was last heard of.
    double silence(int p);

    void send(const Buffer& x, int64_t width, int dst, int64_t tag, double timeout, const std::function<void()>& check);
    ExpectedPtr post_receive(const Buffer& x, int64_t width, int src, int64_t tag, std::shared_ptr<void> keeper);
    // check(): called from time to time while waiting; it throws to end the wait.
    int wait(const ExpectedPtr& expected, double timeout, const std::function<void()>& check);
    bool is_completed(const ExpectedPtr& expected);
    bool cancel(const ExpectedPtr& expected);
    int64_t limit() const { return limit_.load(std::memory_order_relaxed); }
    void set_limit(int64_t num_bytes);
    int64_t buffered();

    // Waits until the other sides' kernels have everything, for at most `patience` seconds.
    void hand_over(double patience);
    // Ends all waits; then closes the connections. A forked child closes its connections at once.
    void close(const std::string& why);
    void close_in_child();

   private:
    enum class Subject : uint16_t { kLife, kGoodbye, kAbort, kMessage, kTaken, kLost };

    // Before every part of a control connection's stream.
    struct Heading {
        uint32_t magic = 0;
        Subject subject = Subject::kLife;
        uint16_t reserved = 0;
        int64_t tag = 0;  // of a message; the cause of an abort; the bytes that were taken; the rank that was lost
        int64_t width = 0;
        int64_t num_bytes = 0;  // that follow
    };
    static_assert(sizeof(Heading) == 32);

    struct Arrival {
        int source;
        int64_t tag, width;
        std::vector<char> content;
    };

    struct Line {
        Descriptor socket;
        std::deque<std::vector<char>> out;
        size_t out_at = 0;  // bytes of the first one that have left
        bool wants_room = false;
        Heading heading;
        size_t heading_at = 0;
        std::vector<char> content;
        size_t content_at = 0;
        double heard = 0.0;    // when
        int64_t in_use = 0;    // bytes of messages that were not taken
        int unanswered = 0;    // signs of life since it was heard of
        bool is_over = false;  // nothing more comes
        bool has_vanished = false;
        int lost = -1;  // the first rank whose end has ended one of its messages
        std::optional<Gone> gone;
    };
    using Lock = std::unique_lock<std::mutex>;

    void on_ready(int index) override;
    void on_tick() override;
    const char* address_of(int p) const { return addresses_[static_cast<size_t>(p)].c_str(); }
    Line& line(int p) { return lines_[static_cast<size_t>(p)]; }
    void put(Line& to, Heading heading, const void* content);
    void flush(Line& to);
    void read(int p);
    void finish_part(int p);
    void end(int p, const std::string& what);
    void deliver(Arrival arrival);
    void take(Expected& expected, const Arrival& arrival);
    void finish(Expected& expected, std::exception_ptr failure);
    void give_up_hopeless();
    std::optional<Gone> first_cause_of(int p);
    std::optional<Gone> all_gone(int src);
    void note_lost(int p);
    void drop_keepers(Lock& lock);
    void require_open(const char* name) const;
    [[noreturn]] void fail(int peer, const char* name, double waited, const std::string& what) const;

    const int rank_, size_;
    const std::vector<std::string> addresses_;
    const double dead_after_;
    const std::function<void()> news_;
    std::mutex mutex_;  // of all that follows
    std::condition_variable changed_;
    std::vector<Line> lines_;
    std::list<ExpectedPtr> expected_;  // in the order of posting
    std::list<Arrival> arrived_;       // that nobody expects yet, in the order of arrival
    std::vector<std::shared_ptr<void>> keepers_;
    std::atomic<int64_t> limit_{0};
    int64_t in_use_ = 0;
    bool has_left_ = false, is_closed_ = false, is_in_child_ = false;
    int left_cause_ = -1;
    int lost_ = -1;  // as in Line, of this rank
    std::string why_left_, why_closed_;
};

}  // namespace pycomm
