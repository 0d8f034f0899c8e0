// How arrays travel that do not lie where the others can reach them: in pieces through staging areas, whose size
// decides what bounds it. Small ones stay in the cache of the core that wrote them, from where another one fetches each
// line; large ones are written back to a cache that cores share, or to memory, and ranks wait for each other less
// often. Which is better depends on how a processor's cores reach each other's caches, on who else uses them, and on
// whether ranks outnumber cores. So it is tried out, again and again, and all ranks do as rank 0 finds best.
#pragma once

#include <cstdint>

namespace pycomm {

struct Staging {
    int64_t segment_bytes;
    bool demotes;  // lines are pushed out of the core's own caches once they are written (CLDEMOTE)
};

inline constexpr int64_t kCacheLine = 64;
inline constexpr int64_t kMostSegmentBytes = 2 << 20;
inline constexpr int kNumStagings = 8;
// Of index 0 is what operations begin with.
Staging staging_of(int index);

// Writes `num_bytes` at `to` back to a cache that cores share, if this processor can. A hint: what is there stays.
void demote(const char* to, int64_t num_bytes);

// Says how operations are to be done, and learns from how long they took. Of rank 0; by one thread at a time.
//
// One way is in use, and now and then another one is tried: some pairs of operations, one by each. Only what happened
// one after the other is compared, as how fast a machine is changes with what else it does.
class StagingChoice {
   public:
    StagingChoice();
    // Of the next operation. The same until the next call of observe().
    int next() const { return is_trying() && is_second_ ? tried_ : used_; }
    // An operation on `num_bytes`, done as next() says, took so long.
    void observe(int64_t num_bytes, double seconds);

   private:
    bool is_trying() const { return pause_ == 0; }
    void end_trial();

    int num_ways_;  // without CLDEMOTE there is no use in the others
    int used_ = 0, tried_ = 1;
    bool is_second_ = false;  // of a pair
    double first_ = 0.0;      // seconds per byte of the pair's first operation
    int pairs_ = 0, wins_ = 0;
    int num_trials_ = 0;
    int pause_ = 0;  // operations until the next trial
};

}  // namespace pycomm
