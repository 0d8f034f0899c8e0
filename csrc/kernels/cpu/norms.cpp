#include "kernels/norms.h"

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/loops/loops.h"

namespace pycomm {

void norms(const std::vector<Buffer>& arrays, double* squares, int num_threads) {
    Blocks blocks(arrays);
    int64_t num_bytes = 0;
    for (const Buffer& array : arrays) num_bytes += array.num_bytes();
    std::vector<double> sums(static_cast<size_t>(blocks.count()), 0.0);
    blocks.for_each(useful_threads(num_bytes, num_threads), [&](size_t j, Range part, int64_t block) {
        sums[static_cast<size_t>(block)] =
            loops().squares(element_of(arrays[j], part.begin), arrays[j].dtype, part.size());
    });
    blocks.add_up(sums.data(), 1, squares);
}

}  // namespace pycomm
