// Staging of arrays that the other ranks cannot reach: they travel in pieces through staging areas. The size of a piece
// decides what limits the speed. Small pieces stay in the cache of the core that wrote them, and the reader fetches
// each line from there. Large pieces are written back to a shared cache or to memory, and ranks wait for each other
// less often. Which is faster depends on how cores reach each other's caches, on what else runs, and on whether ranks
// outnumber cores. So the ways are tried at run time, repeatedly, and all ranks follow rank 0's choice.
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
// The way with this index, 0 <= index < kNumStagings. Operations begin with index 0.
Staging staging_of(int index);

// Hints to the processor to write `num_bytes` at `to` back to a cache that cores share. The contents do not change.
void demote(const char* to, int64_t num_bytes);

// Chooses how operations are staged, and learns from how long they took. Only rank 0's choice counts. Not thread-safe.
//
// One way is in use, and from time to time another is tried: in pairs of consecutive operations, one with each way.
// Only the two operations of a pair are compared, because a machine's speed changes with its other load.
class StagingChoice {
   public:
    StagingChoice();
    // The way for the next operation. Does not change until observe() is called.
    int next() const { return is_trying() && is_second_ ? tried_ : used_; }
    // Records that an operation on `num_bytes`, done as next() said, took `seconds`.
    void observe(int64_t num_bytes, double seconds);

   private:
    bool is_trying() const { return pause_ == 0; }
    void end_trial();

    int num_ways_;  // those with CLDEMOTE count only if the processor has it
    int used_ = 0, tried_ = 1;
    bool is_second_ = false;  // the next operation is the second of a pair
    double first_ = 0.0;      // seconds per byte of the pair's first operation
    int pairs_ = 0, wins_ = 0;
    int num_trials_ = 0;
    int pause_ = 0;  // operations until the next trial
};

}  // namespace pycomm
