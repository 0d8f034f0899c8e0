#include "kernels/absmax.h"

#include <cmath>

#include "base/parallel.h"
#include "kernels/cpu/loops/loops.h"

namespace pycomm {

float absmax(const std::vector<Buffer>& arrays, int num_threads) {
    std::vector<float> largest(static_cast<size_t>(num_threads));
    float out = 0.0f;
    for (const Buffer& array : arrays) {
        int threads = useful_threads(array.num_bytes(), num_threads);
        parallel_for(threads, threads, [&](int thread) {
            Range mine = piece_of(array.count, thread, threads, 64);
            largest[static_cast<size_t>(thread)] =
                loops().absmax(array.bytes() + mine.begin * size_of(array.dtype), array.dtype, mine.size());
        });
        for (int thread = 0; thread < threads; ++thread) {
            float value = largest[static_cast<size_t>(thread)];
            if (std::isnan(value)) return value;
            out = value > out ? value : out;
        }
    }
    return out;
}

}  // namespace pycomm
