// Layout of the memory through which ranks communicate, and one operation in progress.
#pragma once

#include <cmath>
#include <cstring>

#include "base/error.h"
#include "transport/memory.h"
#include "transport/operation.h"
#include "transport/shared_memory/group.h"
#include "transport/shared_memory/message_layout.h"
#include "transport/shared_memory/shares.h"
#include "transport/shared_memory/staging.h"

namespace pycomm {

// The first bytes of every rank's file.
struct Control {
    // Adjacent, so that polling the clock also fetches the announcement. Two announcements, used in turn: a rank writes
    // the next one while others still read the last.
    alignas(64) std::atomic<uint32_t> clock;
    std::atomic<int32_t> core;  // where this rank ran when it advanced the clock
    Operation announced[2];
    alignas(64) std::atomic<uint32_t> sleepers;
    std::atomic<uint32_t> gave_up;
    // Valid once gave_up is set: the step that this rank did not complete, the rank that failed (-1: itself), and why.
    uint32_t failed_step;
    int32_t failed_peer;
    // Belongs to announced[i]: the largest magnitude in what the caller left outside its array.
    std::atomic<float> largest[2];
    char why[512];
    char refusal[2][512];   // belongs to announced[i] of Kind::kRefused
    char algorithm[2][64];  // belongs to announced[i] of Kind::kProgram
    // Wakes this rank when a message was posted for it, or one of its own was taken.
    alignas(64) std::atomic<uint32_t> rings;
    std::atomic<uint32_t> listening;
    std::atomic<int32_t> awaited;  // a rank that this one waits for; -1: none, or only briefly
    std::atomic<int32_t> lost;     // 1 + the first rank whose end made a wait for messages fail; 0: none
};

// Counts of messages between the file's owner and one peer since the group began; they wrap around. The owner writes
// both, the peer reads them.
struct alignas(64) Channel {
    std::atomic<uint32_t> posted;  // by the owner, for the peer to take
    std::atomic<uint32_t> taken;   // by the owner, of what the peer posted
};

inline constexpr int64_t kControlBytes = 4096;
inline constexpr int64_t kMailboxBytes = 64 << 10;
// A staging area has two segments, used in turn. Memory that is never written to costs nothing.
inline constexpr int64_t kChannelsAt = kControlBytes + 2 * kMailboxBytes + 2 * kMostSegmentBytes;
static_assert(sizeof(Control) <= kControlBytes);

// A peer can change anything in its file at any moment. So announcements are copied once, checked, and then read from
// the copy only. Message counters decide when something is read or written, never where.

// Offset of the memory for messages, see message_layout.h.
inline int64_t post_office_at(int size) {
    constexpr int64_t kUnit = 4096;
    return kChannelsAt + (size * static_cast<int64_t>(sizeof(Channel)) + kUnit - 1) / kUnit * kUnit;
}

// Offset of the arena: a multiple of this machine's page size, because single blocks of the arena may be mapped again.
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
    // The first step: announces the operation, waits for all ranks and compares. Throws ArgumentError on every rank,
    // naming the first difference.
    void announce(Operation mine);
    // Ends a step of this rank and waits until all ranks have ended theirs.
    void step();

    // A step in which ranks exchange messages. Neither its beginning nor its end waits for anybody. But if another rank
    // gave up during the step, this rank's call fails too: data that it read may have been overwritten by then.
    void begin_messages();
    void end_messages();
    // Counters of `owner` for its messages with `peer`; one of them is this rank.
    Channel& channel(int owner, int peer) const {
        return reinterpret_cast<Channel*>(group_.base(owner) + kChannelsAt)[peer];
    }
    // Wakes p to look at its channels. Call it after a sequentially consistent store to one of them.
    void ring(int p) const { bell_of(p).ring(); }
    // Returns once done() is true; only messages may change it. peer(): a rank that is being waited for.
    void await_messages(const std::function<int()>& peer, const std::function<bool()>& done);

    Control& control(int p) const { return group_.control(p); }
    // Copy of p's announcement, checked.
    const Operation& announced(int p) const { return group_.announced_[static_cast<size_t>(p)]; }
    // Fails because p announced something impossible.
    [[noreturn]] void distrust(int p);
    bool is_in_arena(int p) const { return announced(p).offset >= 0; }
    // Whether ranks outnumber cores, as rank 0 sees it.
    bool is_crowded() const { return announced(0).slack < 0.0f; }
    bool all_in_arenas() const;
    bool any_in_arena() const;
    bool any_is_apart() const;
    // The shares follow from the slacks announced in the previous large operation: they are known before this one
    // begins.
    Shares shares(int64_t num_bytes) const;
    // To be called before this rank's last step, or before its announcement.
    void note_largest(float magnitude);
    // The maximum over all ranks. To be called once all have ended their last step.
    float largest() const;
    Staging how_to_stage() const { return staging_of(announced(0).staging); }
    void observe_staging(int64_t num_bytes, double seconds);
    char* in_arena(int p) const { return in_file(p, announced(p).offset); }
    char* in_file(int p, int64_t offset) const { return group_.base(p) + offset; }
    // Whether `num_bytes` at `offset`, both named by a peer, lie where its arrays may be: in its arena or in this
    // call's mailbox.
    bool may_hold_array(int64_t offset, int64_t num_bytes) const;
    char* shadow(int p) const { return group_.base(p) + announced(p).shadow; }
    void name_algorithm(const std::string& name);  // for the next announcement
    // This call's mailbox; calls alternate between two.
    char* mailbox(int p) const { return group_.base(p) + kControlBytes + slot_ * kMailboxBytes; }
    char* staged_input(int p, int64_t segment) const {
        return group_.base(p) + kControlBytes + 2 * kMailboxBytes + segment % 2 * kMostSegmentBytes;
    }

   private:
    void leave();
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
    std::vector<double> slacks_;  // as announced in the previous large operation; empty until this one is announced
    bool is_under_way_ = false;   // all ranks have joined
    double next_look_;            // when to look at the peers' processes next, in seconds of waiting
    int stopped_ = -1;            // the rank seen stopped at the last look; -1: none
    double stopped_since_ = 0.0;  // how long this call had waited when it was first seen stopped
};

}  // namespace pycomm
