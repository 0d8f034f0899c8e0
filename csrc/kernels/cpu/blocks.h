// Many arrays cut into blocks of a fixed size, so that sums by blocks do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "base/parallel.h"
#include "kernels/cpu/pieces.h"

namespace pycomm {

inline constexpr int64_t kNormBlock = 16384;  // elements

class Blocks {
   public:
    explicit Blocks(const std::vector<Buffer>& arrays) : offsets_(offsets_of(arrays)), first_(arrays.size() + 1, 0) {
        for (size_t j = 0; j < arrays.size(); ++j) {
            first_[j + 1] = first_[j] + (arrays[j].count + kNormBlock - 1) / kNormBlock;
        }
    }

    int64_t count() const { return first_.back(); }
    // Blocks of array j.
    Range of(size_t j) const { return {first_[j], first_[j + 1]}; }

    // Calls block(j, range of array j, number of the block) for every block, cut over threads by elements.
    template <class Block>
    void for_each(int threads, Block&& block) const {
        parallel_for(threads, threads, [&](int thread) {
            // A block belongs to the thread in whose piece it begins.
            Range mine = piece_of(offsets_.back(), thread, threads, 1);
            for_pieces_of(offsets_, mine, [&](size_t j, Range part) {
                int64_t begin = part.begin - offsets_[j], end = part.end - offsets_[j];
                int64_t size = offsets_[j + 1] - offsets_[j];
                for (int64_t b = (begin + kNormBlock - 1) / kNormBlock; b * kNormBlock < end; ++b) {
                    block(j, Range{b * kNormBlock, std::min((b + 1) * kNormBlock, size)}, first_[j] + b);
                }
            });
        });
    }

    // out[j * stride]: the sum over the blocks of array j, in order, of sums[block * stride].
    void add_up(const double* sums, int64_t stride, double* out) const {
        for (size_t j = 0; j + 1 < first_.size(); ++j) {
            double total = 0.0;
            for (int64_t b = first_[j]; b < first_[j + 1]; ++b) total += sums[b * stride];
            out[static_cast<int64_t>(j) * stride] = total;
        }
    }

   private:
    std::vector<int64_t> offsets_;
    std::vector<int64_t> first_;  // block of each array
};

}  // namespace pycomm
