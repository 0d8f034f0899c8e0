// What ranks write for one another, and one operation in progress. Internal to transport/.
#pragma once

#include <cstring>

#include "base/error.h"
#include "transport/shared_memory.h"

namespace pycomm {

enum class Kind : uint8_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kBarrier, kRefused };

// An announcement. Everything before `offset` must agree on all ranks.
struct Operation {
    Kind kind;
    DType dtype = DType::kU8;
    ReduceOp op = ReduceOp::kSum;
    uint8_t unused = 0;
    int32_t root = 0;
    int64_t count = 0;    // of the elements of x
    int64_t offset = -1;  // of x in the announcing rank's file, -1: not there

    bool agrees_with(const Operation& other) const { return std::memcmp(this, &other, 16) == 0; }
};
static_assert(sizeof(Operation) == 24);

// The first bytes of every rank's file.
struct Control {
    // One line: whoever polls the clock gets the announcement with it. Two announcements, used in turn: a rank writes
    // the next one while others still read the last.
    alignas(64) std::atomic<uint32_t> clock;
    Operation announced[2];
    alignas(64) std::atomic<uint32_t> sleepers;
    std::atomic<uint32_t> gave_up;
    uint32_t failed_step;  // which step this rank did not end; valid, as is `why`, once gave_up is set
    char why[512];
    char refusal[2][512];  // goes with announced[i] of Kind::kRefused
};

inline constexpr int64_t kControlBytes = 4096;
inline constexpr int64_t kMailboxBytes = 64 << 10;
// Two segments of each staging area are in use at a time, by every rank: small enough to stay in the last-level cache.
inline constexpr int64_t kSegmentBytes = 1 << 20;
inline constexpr int64_t kHeaderBytes = kControlBytes + 2 * kMailboxBytes + 4 * kSegmentBytes;
static_assert(sizeof(Control) <= kControlBytes);

// One operation: the lock, the steps and the errors. Its methods are the words in which collectives.cpp is written.
class Call {
   public:
    Call(SharedMemoryGroup& group, const char* name, double timeout);

    int rank() const { return group_.rank_; }
    int size() const { return group_.size_; }

    void post_announcement(Operation mine);
    // First step: tells the others, waits for them and compares. Throws ArgumentError, on every rank, naming the first
    // difference.
    void announce(Operation mine);
    // Ends a step of this rank and waits until all ranks have ended theirs.
    void step();

    Control& control(int p) const { return *reinterpret_cast<Control*>(group_.base(p)); }
    const Operation& announced(int p) const { return control(p).announced[slot_]; }
    bool all_in_arenas() const;
    char* in_arena(int p) const { return group_.base(p) + announced(p).offset; }
    // This call's mailbox; the next call has the other one.
    char* mailbox(int p) const { return group_.base(p) + kControlBytes + slot_ * kMailboxBytes; }
    char* staged_input(int p, int64_t segment) const { return staging(p, segment % 2); }
    char* staged_result(int p, int64_t segment) const { return staging(p, 2 + segment % 2); }

   private:
    char* staging(int p, int64_t index) const {
        return group_.base(p) + kControlBytes + 2 * kMailboxBytes + index * kSegmentBytes;
    }
    Clock clock_of(int p) const { return {control(p).clock, control(p).sleepers}; }
    void await_all();
    void check(int waiting_for, double waited);
    bool gave_up_by_now(int p) const;
    [[noreturn]] void fail(int peer, double waited, const std::string& what);
    void compare() const;

    SharedMemoryGroup& group_;
    std::unique_lock<std::mutex> lock_;
    const char* name_;
    double timeout_;
    uint32_t slot_;
};

}  // namespace pycomm
