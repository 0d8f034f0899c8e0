#include "transport/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace pycomm {
namespace {

constexpr int kPauses = 20;
constexpr double kYieldSeconds = 200e-6;  // a sleep costs about 70 us to end
constexpr long kSliceNanoseconds = 20'000'000;

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

}  // namespace

double monotonic_seconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void Clock::wake() const { futex(&value, FUTEX_WAKE, INT_MAX, nullptr); }

void Clock::post(uint32_t target) const {
    // Sequentially consistent on both sides: either the poster sees the sleeper or the sleeper sees the new value.
    value.store(target, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
}

void wait_until_reached(const Clock& clock, uint32_t target, const std::function<void(double)>& check) {
    for (int i = 0; i < kPauses; ++i) {
        if (clock.reached(target)) return;
        pause_briefly();
    }
    double start = monotonic_seconds();
    do {
        if (clock.reached(target)) return;
        sched_yield();
    } while (monotonic_seconds() - start < kYieldSeconds);
    while (!clock.reached(target)) {
        check(monotonic_seconds() - start);
        clock.sleepers.fetch_add(1, std::memory_order_seq_cst);
        uint32_t seen = clock.value.load(std::memory_order_seq_cst);
        if (static_cast<int32_t>(seen - target) < 0) {
            timespec slice{0, kSliceNanoseconds};
            futex(&clock.value, FUTEX_WAIT, seen, &slice);
        }
        clock.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
}

}  // namespace pycomm
