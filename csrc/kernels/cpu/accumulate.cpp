#include "kernels/accumulate.h"

#include <atomic>

#include "base/parallel.h"
#include "kernels/cpu/loops/loops.h"

namespace pycomm {

bool accumulate(const Buffer& acc, const Buffer* residual, const Buffer& grad, double scale, int num_threads) {
    int threads = useful_threads(acc.num_bytes(), num_threads);
    std::atomic<bool> finite{true};
    parallel_for(threads, threads, [&](int thread) {
        Range mine = piece_of(acc.count, thread, threads, 64);
        int64_t wide = size_of(acc.dtype) * mine.begin;
        const void* old = residual == nullptr ? nullptr : residual->bytes() + wide;
        if (!loops().accumulate(acc.bytes() + wide, old, acc.dtype, grad.bytes() + size_of(grad.dtype) * mine.begin,
                                grad.dtype, mine.size(), scale)) {
            finite = false;
        }
    });
    return finite;
}

}  // namespace pycomm
