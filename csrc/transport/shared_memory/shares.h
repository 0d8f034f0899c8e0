// How much of an operation each rank does. All have the same to do, but for a rank that the others usually wait for:
// its core has something else to do, another process or, while an optimizer hook's thread reduces, its own backward.
// Those who wait do more of it then, as much as keeps all of them busy for equally long, waiting included. Sums have
// the same bits, whoever makes them.
#pragma once

#include <cstdint>
#include <vector>

#include "base/parallel.h"

namespace pycomm {

// Inner borders between parts: whole cache lines of every type, so that two ranks never write one line.
inline constexpr int64_t kPartAlign = 64;
inline constexpr int64_t kUnequalBytes = 1 << 20;  // of operations from which on it matters

class Shares {
   public:
    // slacks[p]: for how long rank p usually waits for others, in seconds; if any is negative, the shares are equal.
    // The result depends on these alone, so that all ranks get the same one.
    Shares(const std::vector<double>& slacks, int64_t num_bytes);
    // Of `count` elements.
    Range of(int64_t count, int p) const;

   private:
    int size_;
    std::vector<double> borders_;  // between the shares, as parts of the whole, with both ends; none: equal ones
};

}  // namespace pycomm
