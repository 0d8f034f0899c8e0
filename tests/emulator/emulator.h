// Runs CUDA kernels on the host, one thread at a time, so that their source can be tested where no GPU exists.
//
// Every thread of a block is a fiber with a stack of its own. A fiber runs until it has to wait for others (a barrier,
// an exchange between the lanes of its warp, another block), and now and then at an atomic; which one runs next is
// drawn at random. Several blocks are under way at once. Shared memory starts as garbage. So code that relies on an
// order that CUDA does not promise, because a barrier is missing, say, gives wrong results with most seeds. When all
// fibers wait, some barrier was not reached by everyone: that is an error too.
//
// What it cannot show: real concurrency between two memory accesses (only one fiber runs at a time), and weak memory
// ordering, so a missing fence goes unnoticed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulator {

struct Settings {
    uint64_t seed = 1;
    int threads_per_block = 64;
    int resident_blocks = 3;  // how many blocks are under way at once
    int multiprocessors = 2;
};
Settings& settings();

// Runs `kernel` once per thread. `together`: all blocks at the same time, or it is an error.
void run(const char* name, int64_t blocks, int threads, bool together, const std::function<void()>& kernel);

// How many kernels have run so far.
int64_t num_launches();

// What the running fiber calls.
int thread_index();
int num_threads();
int block_index();
int num_blocks();
void block_barrier();
const uint64_t* exchange(uint64_t mine);  // the values of all 32 lanes of the warp
void maybe_yield();
void pause();
void* shared(const char* file, int line, size_t num_bytes);

}  // namespace emulator
