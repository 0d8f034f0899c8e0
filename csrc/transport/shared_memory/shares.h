// How much of an operation each rank does. By default all do the same. A rank that the others usually wait for does
// less: its core is busy with another process or, while an optimizer hook's thread reduces, with its own backward pass.
// The waiting ranks take over so much of its share that all are busy for equally long. The bits of a sum do not depend
// on which rank computes it.
#pragma once

#include <cstdint>
#include <vector>

#include "base/parallel.h"

namespace pycomm {

// Alignment of borders between parts, in elements: whole cache lines for every type, so that no two ranks write one
// line.
inline constexpr int64_t kPartAlign = 64;
inline constexpr int64_t kUnequalBytes = 1 << 20;  // smaller operations are shared equally

class Shares {
   public:
    // slacks[p]: rank p's usual wait for others, in seconds; if any is negative, the shares are equal. The result
    // depends on the arguments alone, so all ranks get the same one.
    Shares(const std::vector<double>& slacks, int64_t num_bytes);
    // Rank p's share of `count` elements.
    Range of(int64_t count, int p) const;

   private:
    int size_;
    std::vector<double> borders_;  // of the shares, as fractions of the whole, both ends included; empty: equal shares
};

}  // namespace pycomm
