#include "transport/shared_memory/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "base/time.h"

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

void Clock::wake() const { futex(&value, FUTEX_WAKE, INT_MAX, nullptr); }

void Clock::post(uint32_t target) const {
    // Sequentially consistent on both sides: either the poster sees the sleeper or the sleeper sees the new value.
    value.store(target, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
}

void Bell::ring() const {
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
    rings.fetch_add(1, std::memory_order_seq_cst);
    futex(&rings, FUTEX_WAKE, INT_MAX, nullptr);
}

void wait_until(const WaitPoint& point, const std::function<bool()>& done, const std::function<void(double)>& check) {
    for (int i = 0; i < kPauses; ++i) {
        if (done()) return;
        pause_briefly();
    }
    double start = monotonic_seconds();
    do {
        if (done()) return;
        sched_yield();
    } while (monotonic_seconds() - start < kYieldSeconds);
    while (!done()) {
        check(monotonic_seconds() - start);
        point.sleepers.fetch_add(1, std::memory_order_seq_cst);
        uint32_t seen = point.word.load(std::memory_order_seq_cst);
        const bool is_done = done();
        if (!is_done) {
            timespec slice{0, kSliceNanoseconds};
            futex(&point.word, FUTEX_WAIT, seen, &slice);
        }
        point.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (is_done) return;
    }
}

void wait_until_reached(const Clock& clock, uint32_t target, const std::function<void(double)>& check) {
    wait_until({clock.value, clock.sleepers}, [&] { return clock.reached(target); }, check);
}

}  // namespace pycomm
