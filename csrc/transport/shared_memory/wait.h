// Waiting for another rank: for its clock to reach a step, or for an event that it signals with a bell.
//
// A waiter first polls, for as long as its Patience says, and then sleeps on a futex in slices. Between slices the
// caller's check() runs: it looks for dead peers and signals, and throws to end the wait.
//
// Between polls a waiter pauses if each rank has a core of its own: yielding would give that core away for a whole time
// slice, to a DataLoader worker for instance. If waits are usually short, it polls for longer than a time slice: the
// awaited rank may just have lost its core, and a sleeper tends to be woken on its peer's core. Both would then stay
// there, because they look like little work to the scheduler; after a while one of them moves.
//
// A waiter yields instead if ranks outnumber cores, or if the awaited rank was last seen on this core. So does any
// thread but the process's first one, which may have work to do.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "transport/group.h"

namespace pycomm {

// Seconds between two looks at the processes that a waiter waits for.
inline constexpr double kLookSeconds = 0.1;

// How long one kind of wait polls before it sleeps. Learns from earlier waits, across operations; thread-safe.
class Patience {
   public:
    // Long polling pays if waits usually take less than `worthwhile` seconds.
    explicit Patience(double worthwhile) : worthwhile_(worthwhile) {}

    // Whether ranks outnumber their cores.
    void set_crowded(bool crowded) { crowded_.store(crowded, std::memory_order_relaxed); }
    bool crowded() const { return crowded_.load(std::memory_order_relaxed); }

    // How long to poll before sleeping, in seconds.
    double seconds(bool yields) const;
    // Records the length of a wait.
    void learn(double waited);

   private:
    const double worthwhile_;
    std::atomic<bool> crowded_{true};
    std::atomic<double> usual_{0.0};  // seconds; about the median of waits, which a few long ones do not move
};

// A word in shared memory on which to sleep. `sleepers` saves the waker a system call when nobody sleeps.
struct WaitPoint {
    std::atomic<uint32_t>& word;  // changes before anybody is woken
    std::atomic<uint32_t>& sleepers;
    const std::atomic<int32_t>* core = nullptr;  // where the awaited rank was last seen; null: not a single rank
    bool gives_way = false;                      // of two ranks on one core, whether this one moves
};

// Returns once done() is true. It is not called again after that, so it may consume what it waits for. check(seconds
// waited so far) runs before each sleep; if it throws, the wait ends. The waker first makes done() true, then looks for
// sleepers, then changes the word and wakes them. The first two are sequentially consistent, so either the waker sees
// the sleeper or the sleeper sees the event.
void wait_until(const WaitPoint& point, const std::function<bool()>& done, const std::function<void(double)>& check,
                Patience& patience);

// A clock that one rank advances and the others wait for. Lives in shared memory; `sleepers` lies on another cache
// line, so that counting sleepers does not slow down readers of the value.
struct Clock {
    std::atomic<uint32_t>& value;
    std::atomic<uint32_t>& sleepers;
    std::atomic<int32_t>& core;  // where its rank ran when it advanced the clock
    bool gives_way = false;      // as in WaitPoint

    bool reached(uint32_t target) const {
        return static_cast<int32_t>(value.load(std::memory_order_acquire) - target) >= 0;  // wraps around
    }
    void post(uint32_t target) const;  // by the owner only
    void wake() const;                 // makes all sleepers look again
};

// A bell that any rank rings and one rank listens to.
struct Bell {
    std::atomic<uint32_t>& rings;
    std::atomic<uint32_t>& sleepers;

    void ring() const;  // call it after a sequentially consistent store of what the listener waits for
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

void wait_until_reached(const Clock& clock, uint32_t target, const std::function<void(double)>& check,
                        Patience& patience);

}  // namespace pycomm
