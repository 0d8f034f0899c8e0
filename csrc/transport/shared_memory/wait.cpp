#include "transport/shared_memory/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "base/time.h"
#include "transport/cores.h"

namespace pycomm {
namespace {

constexpr int kLooks = 20;         // first polls, before the time is read
constexpr int kPausesPerLook = 4;  // after those
// Waking up costs about 70 us: polling for three times as long is never much worse than sleeping at once.
constexpr double kYieldSeconds = 200e-6;
constexpr double kPauseSeconds = 5e-3;  // longer than a time slice
constexpr double kVainSeconds = 20e-6;  // if polling would most likely be in vain
constexpr double kLeastUsual = 1e-6, kStep = 1.1;
constexpr int kEncounters = 32;         // waits on the awaited rank's core before one of the two moves
constexpr double kMoveSeconds = 50e-3;  // between two moves: if the scheduler undoes them, it knows better
constexpr long kSliceNanoseconds = 20'000'000;

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    // Not `yield`: most cores treat it as a nop, and the awaited cache line would be requested all the time. Flushing
    // the pipeline takes about as long as a pause on x86.
    asm volatile("isb");
#endif
}

bool is_first_thread() {
    static thread_local const bool is_first = syscall(SYS_gettid) == getpid();
    return is_first;
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

// Counts an encounter on this core; after kEncounters, moves this thread to another core that it may use.
void make_room() {
    static thread_local int encounters = 0;
    static thread_local double next_move = 0.0;
    if (++encounters < kEncounters) return;
    encounters = 0;
    const double now = monotonic_seconds();
    if (now < next_move) return;
    next_move = now + kMoveSeconds;
    leave_this_core();
}

}  // namespace

void Clock::wake() const { futex(&value, FUTEX_WAKE, INT_MAX, nullptr); }

void Clock::post(uint32_t target) const {
    // Sequentially consistent on both sides: either the poster sees the sleeper or the sleeper sees the new value.
    core.store(sched_getcpu(), std::memory_order_relaxed);
    value.store(target, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
}

void Bell::ring() const {
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
    rings.fetch_add(1, std::memory_order_seq_cst);
    futex(&rings, FUTEX_WAKE, INT_MAX, nullptr);
}

double Patience::seconds(bool yields) const {
    if (yields) return kYieldSeconds;
    return usual_.load(std::memory_order_relaxed) < worthwhile_ ? kPauseSeconds : kVainSeconds;
}

void Patience::learn(double waited) {
    const double before = std::max(usual_.load(std::memory_order_relaxed), kLeastUsual);
    usual_.store(waited > before ? before * kStep : before / kStep, std::memory_order_relaxed);  // threads may race
}

void wait_until(const WaitPoint& point, const std::function<bool()>& done, const std::function<void(double)>& check,
                Patience& patience) {
    for (int i = 0; i < kLooks; ++i) {
        if (done()) return patience.learn(0.0);
        pause_briefly();
    }
    before_long_wait();
    const double start = monotonic_seconds();
    auto waited = [&] { return monotonic_seconds() - start; };
    auto is_on_this_core = [&] {
        return point.core != nullptr && point.core->load(std::memory_order_relaxed) == sched_getcpu();
    };
    const bool yields = patience.crowded() || !is_first_thread();
    const double limit = patience.seconds(yields);
    double next_yield = kYieldSeconds;  // the awaited rank may have moved to this core since it was last seen
    for (double now = 0.0; now < limit; now = waited()) {
        if (done()) return patience.learn(now);
        const bool meets = !yields && is_on_this_core();
        if (meets && point.gives_way) make_room();
        if (yields || meets || now >= next_yield) {
            sched_yield();
            next_yield = now + kYieldSeconds;
        } else {
            for (int i = 0; i < kPausesPerLook; ++i) pause_briefly();
        }
    }
    while (!done()) {
        check(waited());
        point.sleepers.fetch_add(1, std::memory_order_seq_cst);
        // done() may read with acquire only, and the language allows such a read to move before the addition. Without a
        // fence, the waker could miss the sleeper while the sleeper misses the event. (On x86 the addition is a fence.)
        std::atomic_thread_fence(std::memory_order_seq_cst);
        uint32_t seen = point.word.load(std::memory_order_seq_cst);
        const bool is_done = done();
        if (!is_done) {
            timespec slice{0, kSliceNanoseconds};
            futex(&point.word, FUTEX_WAIT, seen, &slice);
        }
        point.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (is_done) break;
    }
    patience.learn(waited());
}

void wait_until_reached(const Clock& clock, uint32_t target, const std::function<void(double)>& check,
                        Patience& patience) {
    wait_until(
        {clock.value, clock.sleepers, &clock.core, clock.gives_way}, [&] { return clock.reached(target); }, check,
        patience);
}

}  // namespace pycomm
