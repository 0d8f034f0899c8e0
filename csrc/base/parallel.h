// A small pool of threads for the CPU kernels.
//
// The caller works too: num_threads = 1 starts nothing and runs inline. Idle workers sleep on a condition variable and
// never spin, because torch's own OpenMP pool lives in the same process and ranks may outnumber cores. Only one caller
// uses the pool at a time; meanwhile a second one (the communication thread, say) runs its tasks inline.
#pragma once

#include <cstdint>
#include <functional>

namespace pycomm {

// Runs task(0) ... task(num_tasks - 1), each exactly once, on up to num_threads threads. Tasks must not throw.
void parallel_for(int num_tasks, int num_threads, const std::function<void(int)>& task);

struct Range {
    int64_t begin;
    int64_t end;
    int64_t size() const { return end - begin; }
};

// Piece `index` of `count` items cut into `pieces` whose inner borders are multiples of `align`.
inline Range piece_of(int64_t count, int index, int pieces, int64_t align) {
    auto border = [&](int64_t i) { return i == pieces ? count : count / align * i / pieces * align; };
    return {border(index), border(index + 1)};
}

// Number of threads for `num_bytes` of memory traffic: below 256 KiB each, waking one costs more than it saves.
inline int useful_threads(int64_t num_bytes, int num_threads) {
    int64_t useful = num_bytes / (256 << 10);
    return useful < 1 ? 1 : useful < num_threads ? static_cast<int>(useful) : num_threads;
}

}  // namespace pycomm
