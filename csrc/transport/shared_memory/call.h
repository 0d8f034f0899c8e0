// Layout of the memory that ranks write for one another, and one operation in progress. For transport/ and execute/.
#pragma once

#include <cmath>
#include <cstring>

#include "base/error.h"
#include "transport/memory.h"
#include "transport/shared_memory/group.h"
#include "transport/shared_memory/message_layout.h"
#include "transport/shared_memory/shares.h"
#include "transport/shared_memory/staging.h"

namespace pycomm {

enum class Kind : uint8_t {
    kAllReduce,
    kReduceScatter,
    kAllGather,
    kBroadcast,
    kBarrier,
    kRefused,
    kProgram,
    kAllToAll,
    kReduce,
    kAllToAllV,
    kReduceScatterV
};

// An announcement. Everything before `offset` must agree on all ranks.
struct Operation {
    Kind kind;
    DType dtype = DType::kU8;
    ReduceOp op = ReduceOp::kSum;
    uint8_t tag = 0;  // as Buffer has it
    int32_t root = 0;
    int64_t count = 0;      // of the elements of x
    uint64_t schedule = 0;  // for kProgram: a digest of the table that all ranks must have
    int64_t offset = -1;    // of x in the announcing rank's file, -1: not there
    int64_t shadow = -1;    // for kProgram: of the array's shadow, see execute/run.h
    int16_t staging = 0;    // as rank 0 announces it, all do: see staging.h
    int16_t is_apart = 0;   // what this rank reduces itself lies elsewhere
    float slack = -1.0f;    // for how long this rank waits for others as a rule, in seconds; -1: see shares.h

    // Bytes of an element of the array at `offset`, or at `shadow`. A program sums means of half types as floats.
    int64_t array_width() const {
        bool widened = kind == Kind::kProgram && op == ReduceOp::kMean && size_of(dtype) == 2;
        return widened ? size_of(DType::kF32) : size_of(dtype);
    }
    bool agrees_with(const Operation& other) const { return std::memcmp(this, &other, 24) == 0; }
};
static_assert(sizeof(Operation) == 48);

// The first bytes of every rank's file.
struct Control {
    // One line: whoever polls the clock gets the announcement with it. Two announcements, used in turn: a rank writes
    // the next one while others still read the last.
    alignas(64) std::atomic<uint32_t> clock;
    std::atomic<int32_t> core;  // on which this rank was when it advanced the clock
    Operation announced[2];
    alignas(64) std::atomic<uint32_t> sleepers;
    std::atomic<uint32_t> gave_up;
    // Valid once gave_up is set: the step that this rank did not end, the rank that failed (-1: itself), and why.
    uint32_t failed_step;
    int32_t failed_peer;
    std::atomic<float> largest[2];  // goes with announced[i]: magnitude in what this rank did not copy into its array
    char why[512];
    char refusal[2][512];   // goes with announced[i] of Kind::kRefused
    char algorithm[2][64];  // goes with announced[i] of Kind::kProgram
    // Wakes this rank when a message has come for it or was taken.
    alignas(64) std::atomic<uint32_t> rings;
    std::atomic<uint32_t> listening;
    std::atomic<int32_t> awaited;  // one rank that this one waits for, -1: none, or not for long
    std::atomic<int32_t> lost;     // 1 + the first rank whose end has ended a wait for messages; 0: none has
};

// Messages between the owner of the file it is in and one peer, counted since the group began; they wrap around. Both
// are written by the owner and read by the peer.
struct alignas(64) Channel {
    std::atomic<uint32_t> posted;  // by the owner, for the peer to take
    std::atomic<uint32_t> taken;   // by the owner, of what the peer posted
};

inline constexpr int64_t kControlBytes = 4096;
inline constexpr int64_t kMailboxBytes = 64 << 10;
// Two segments of each staging area are in use at a time, by every rank. Memory that is never written to costs nothing.
inline constexpr int64_t kChannelsAt = kControlBytes + 2 * kMailboxBytes + 4 * kMostSegmentBytes;
static_assert(sizeof(Control) <= kControlBytes);

// Everything in a peer's file may change at any moment, if the peer wants. What is acted upon is copied once, checked,
// and taken from the copy; counters of messages decide when something is read or written, never where.

// Offset of what messages need, see message_layout.h.
inline int64_t post_office_at(int size) {
    constexpr int64_t kUnit = 4096;
    return kChannelsAt + (size * static_cast<int64_t>(sizeof(Channel)) + kUnit - 1) / kUnit * kUnit;
}

// Offset of the arena, whose blocks are mapped by themselves now and then: whole pages of this machine.
inline int64_t header_bytes(int size) { return whole_pages(post_office_at(size) + post_office_bytes(size)); }

// The larger one of two magnitudes; NaN is the largest.
inline float larger(float a, float b) { return a >= b || std::isnan(a) ? a : b; }

// One operation: the lock, the steps and the errors. The collectives are written with its methods.
class Call {
   public:
    Call(SharedMemoryGroup& group, const char* name, double timeout);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    int rank() const { return group_.rank_; }
    int size() const { return group_.size_; }
    const char* name() const { return name_; }

    void post_announcement(Operation mine);
    // Announces that this rank cannot take part.
    void refuse(const std::string& reason);
    // First step: tells the others, waits for them and compares. Throws ArgumentError, on every rank, naming the first
    // difference.
    void announce(Operation mine);
    // Ends a step of this rank and waits until all ranks have ended theirs.
    void step();

    // A step in which ranks exchange messages. It begins for this rank, and ends: nobody is waited for. But if a rank
    // gave up in it, this one's call fails too: what it took may have been written after that.
    void begin_messages();
    void end_messages();
    // Counters of `owner` for its messages with `peer`; one of them is this rank.
    Channel& channel(int owner, int peer) const {
        return reinterpret_cast<Channel*>(group_.base(owner) + kChannelsAt)[peer];
    }
    // Tells p to look at its channels, after a sequentially consistent store to one of them.
    void ring(int p) const { bell_of(p).ring(); }
    // Returns when done(), which only messages make true. peer(): a rank that is waited for at the moment.
    void await_messages(const std::function<int()>& peer, const std::function<bool()>& done);

    Control& control(int p) const { return group_.control(p); }
    // Copy of p's announcement, checked.
    const Operation& announced(int p) const { return group_.announced_[static_cast<size_t>(p)]; }
    // Fails because p announced what no correct rank does.
    [[noreturn]] void distrust(int p);
    bool is_in_arena(int p) const { return announced(p).offset >= 0; }
    bool all_in_arenas() const;
    bool any_in_arena() const;
    bool any_is_apart() const;
    // They follow from what ranks told in the large operation before this one, so that they are known when it begins.
    Shares shares(int64_t num_bytes) const;
    // Before this rank's last step, or its announcement.
    void note_largest(float magnitude);
    // Of all ranks; once all have ended their last step.
    float largest() const;
    Staging how_to_stage() const { return staging_of(announced(0).staging); }
    void observe_staging(int64_t num_bytes, double seconds);
    char* in_arena(int p) const { return in_file(p, announced(p).offset); }
    char* in_file(int p, int64_t offset) const { return group_.base(p) + offset; }
    // Whether `num_bytes` at an offset of a file that a peer named lie where it may have arrays: in its arena, or in
    // this call's mailbox.
    bool may_hold_array(int64_t offset, int64_t num_bytes) const;
    char* shadow(int p) const { return group_.base(p) + announced(p).shadow; }
    void name_algorithm(const std::string& name);  // for the next announcement
    // This call's mailbox; the next call has the other one.
    char* mailbox(int p) const { return group_.base(p) + kControlBytes + slot_ * kMailboxBytes; }
    char* staged_input(int p, int64_t segment) const { return staging(p, segment % 2); }
    char* staged_result(int p, int64_t segment) const { return staging(p, 2 + segment % 2); }

   private:
    void leave();
    char* staging(int p, int64_t index) const {
        return group_.base(p) + kControlBytes + 2 * kMailboxBytes + index * kMostSegmentBytes;
    }
    Clock clock_of(int p) const { return {control(p).clock, control(p).sleepers, control(p).core, rank() > p}; }
    Bell bell_of(int p) const { return {control(p).rings, control(p).listening}; }
    void await_all();
    Patience& patience() { return is_under_way_ ? group_.between_steps_ : group_.for_others_; }
    void require_nobody_gave_up();
    void check(int waiting_for, double waited);
    void look_at_processes(double waited);
    void look_at_stopped(int p, double waited);
    [[noreturn]] void time_out(int waiting_for, double waited);
    bool has_arrived(int p) const { return p == rank() || clock_of(p).reached(group_.clock_); }
    bool gave_up_by_now(int p) const;
    [[noreturn]] void fail_with(int p, double waited);  // p gave up
    [[noreturn]] void fail(int peer, double waited, const std::string& what);
    void take_announcements(const Operation& mine);
    void compare() const;

    SharedMemoryGroup& group_;
    std::unique_lock<std::mutex> lock_;
    const char* name_;
    double timeout_;
    uint32_t slot_;
    std::vector<double> slacks_;  // as the large operation before this one told them; none until this one is announced
    bool is_under_way_ = false;   // all ranks have come
    double next_look_;            // at the peers' processes, in seconds of waiting
    int stopped_ = -1;  // the first rank that was seen stopped at the last look, and how long this call had waited then
    double stopped_since_ = 0.0;
};

}  // namespace pycomm
