// One operation over TCP: the lock, the frames, the waits and the errors. The collectives are written with its methods.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/tcp/group.h"

namespace pycomm {

// The first bytes that a rank sends to each other rank in an operation. Little endian, as all machines that torch runs
// on. What follows: `extra` bytes that belong to it, then the first `attached` bytes of data.
struct Frame {
    uint32_t magic;
    uint16_t version;
    uint16_t reserved;
    uint64_t meeting;
    uint64_t number;
    char operation[kAgreedBytes];
    uint32_t extra;     // a table of lengths, the name of an algorithm, or the reason of a refusal
    uint32_t attached;  // at most 64 KB
    uint32_t zero;
    uint32_t check;  // of the bytes before
};
static_assert(sizeof(Frame) == 64);

class TcpCall {
   public:
    // members: in rising order, this rank among them.
    TcpCall(TcpGroup& group, const char* name, double timeout, std::vector<int> members);
    ~TcpCall();
    TcpCall(const TcpCall&) = delete;
    TcpCall& operator=(const TcpCall&) = delete;

    const char* name() const { return name_; }
    int rank() const { return group_.rank_; }
    const std::vector<int>& members() const { return members_; }
    int num_members() const { return static_cast<int>(members_.size()); }
    int index() const { return index_; }  // of this rank among the members
    Link& link(int p) const { return group_.links_[static_cast<size_t>(p)]; }
    // The other members, the next ones first, so that not all send to the same one at once.
    const std::vector<int>& peers() const { return peers_; }

    // Bytes for rank p, to be called before begin(). They are the first ones after the frame.
    void attach(int p, const void* data, int64_t num_bytes) { first_.push_back({p, data, num_bytes}); }
    // Exchanges frames with all members, and compares: throws ArgumentError on each, naming the first difference.
    // verify(): compares what came as `extra`; throws the same kind of error on all members.
    void begin(
        const Operation& mine, const void* extra = nullptr, uint32_t extra_bytes = 0,
        const std::function<void()>& verify = [] {});
    // What p sent with its frame.
    const std::vector<char>& extra_of(int p) const { return extras_[static_cast<size_t>(p)]; }
    void refuse(const std::string& reason);

    // Moves bytes of all connections; waits until something moves if nothing does.
    void move();
    // Moves until everything that is wanted has come.
    void receive_all();
    // Moves until that has come, and what was queued has left.
    void finish();
    // At least `num_bytes` to receive into, kept by the group.
    char* scratch(int64_t num_bytes);
    [[noreturn]] void distrust(int p, const char* what);

   private:
    // What is attached for a rank.
    struct First {
        int peer;
        const void* data;
        int64_t num_bytes;
    };
    // A frame that is being read.
    struct Reading {
        enum class Stage : uint8_t { kFrame, kExtra, kSkipped, kDone } stage = Stage::kFrame;
        Frame frame;
    };

    void leave();
    void send_frames(const Operation& mine, const void* extra, uint32_t extra_bytes);
    void read_frames();
    void advance(int p);
    void compare();
    void skip_attached();
    bool move_at_once();
    void wait();
    void check(double waited);
    int awaited() const;
    [[noreturn]] void time_out(double waited);
    [[noreturn]] void fail(int cause, double waited, const std::string& what);

    TcpGroup& group_;
    std::unique_lock<std::mutex> lock_;
    const char* name_;
    const double timeout_;
    const std::vector<int> members_;
    std::vector<int> peers_;
    int index_ = 0;
    std::vector<First> first_;
    std::vector<Frame> frames_;      // those that are sent, by rank
    std::vector<Reading> readings_;  // by rank
    std::vector<std::vector<char>> extras_;
};

}  // namespace pycomm
