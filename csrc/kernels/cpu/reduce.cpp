#include "kernels/reduce.h"

#include "kernels/cpu/loops/loops.h"
#include "kernels/cpu/pieces.h"

namespace pycomm {

void reduce(const Buffer& out, const std::vector<Buffer>& inputs, ReduceOp op, int num_threads) {
    const int num_streamed = out.num_bytes() >= kStreamingBytes ? 1 : 0;
    int threads = useful_threads(out.num_bytes(), num_threads);
    parallel_for(threads, threads, [&](int thread) {
        Range mine = piece_of(out.count, thread, threads, 64);
        int64_t offset = mine.begin * size_of(out.dtype);
        std::vector<const void*> from;
        for (const Buffer& input : inputs) from.push_back(input.bytes() + offset);
        void* to = out.bytes() + offset;
        loops().reduce(&to, 1, from.data(), static_cast<int>(from.size()), out.dtype, op, mine.size(), num_streamed);
    });
}

void reduce_range(void* const* outs, int num_outs, const void* const* inputs, int num_inputs, DType dtype, ReduceOp op,
                  int64_t count, int num_streamed) {
    loops().reduce(outs, num_outs, inputs, num_inputs, dtype, op, count, num_streamed);
}

}  // namespace pycomm
