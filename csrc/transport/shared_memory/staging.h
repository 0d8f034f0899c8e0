// How arrays travel that do not lie where the others can reach them: in pieces through staging areas, whose size
// decides what bounds it. Small ones stay in the cache of the core that wrote them, from where another one fetches each
// line; large ones are written back to a cache that cores share, or to memory, and ranks wait for each other less
// often. Which is better depends on how a processor's cores reach each other's caches, on who else uses them, and on
// whether ranks outnumber cores. So it is tried out, again and again, and all ranks do as rank 0 finds best.
#pragma once

#include <array>
#include <cstdint>
#include <limits>

namespace pycomm {

struct Staging {
    int64_t segment_bytes;
    bool demotes;  // lines are pushed out of the core's own caches once they are written (CLDEMOTE)
};

inline constexpr int64_t kMostSegmentBytes = 4 << 20;
inline constexpr int kNumStagings = 10;
// Of index 0 is what operations begin with.
Staging staging_of(int index);

// Writes `num_bytes` at `to` back to a cache that cores share, if this processor can. A hint: what is there stays.
void demote(const char* to, int64_t num_bytes);

// Remembers how fast operations were, and says how the next one is to be done. Of rank 0; by one thread at a time.
class StagingChoice {
   public:
    StagingChoice();
    // Of the next operation. The same until the next call of observe().
    int next() const;
    // An operation on `num_bytes` by staging `index` took so long.
    void observe(int index, int64_t num_bytes, double seconds);

   private:
    int best() const;

    int num_tried_;  // the first so many: without CLDEMOTE there is no use in the others
    int64_t count_ = 0;
    std::array<double, kNumStagings> seconds_per_byte_;
};

}  // namespace pycomm
