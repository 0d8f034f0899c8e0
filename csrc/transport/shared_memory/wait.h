// Waiting for what another rank does: for its clock to reach a step, or for anything it then rings a bell about.
//
// A waiter looks again and again for as long as its patience tells, then sleeps on a futex in slices. Between looks it
// pauses, where each rank has a core of its own: yielding would hand that core to whatever else wants it, a
// DataLoader's worker for instance, for a whole time slice. And it does so for longer than such a slice, if waits are
// short usually: the rank that is waited for may have lost its core, and a sleeper tends to be woken on that of its
// peer, where both then remain, as they do not look like much work to a scheduler: after a while one of them leaves. It
// yields where ranks outnumber cores, or where the rank that is waited for was seen on this very core; and so does any
// other thread than a process's first, as that one may have work to do. Between slices of sleep the caller's check()
// runs, which looks for dead peers and signals and throws to end the wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace pycomm {

// How long a waiter waits between two looks at the processes that it waits for.
inline constexpr double kLookSeconds = 0.1;

// How one kind of wait is done: learned from earlier ones, across operations, by any threads.
class Patience {
   public:
    // Waits are worth pausing for if they take less than `worthwhile` seconds as a rule.
    explicit Patience(double worthwhile) : worthwhile_(worthwhile) {}

    // Whether ranks outnumber their cores.
    void set_crowded(bool crowded) { crowded_.store(crowded, std::memory_order_relaxed); }
    bool crowded() const { return crowded_.load(std::memory_order_relaxed); }

    // For how long to look before sleeping, in seconds.
    double seconds(bool yields) const;
    // Remembers how long a wait was.
    void learn(double waited);

   private:
    const double worthwhile_;
    std::atomic<bool> crowded_{true};
    std::atomic<double> usual_{0.0};  // seconds; about the median of waits, which a few long ones do not move
};

// A word in shared memory on which to sleep. `sleepers` keeps the waker from a system call when nobody sleeps.
struct WaitPoint {
    std::atomic<uint32_t>& word;  // changes before anybody is woken
    std::atomic<uint32_t>& sleepers;
    const std::atomic<int32_t>* core = nullptr;  // on which the rank that is waited for was seen last, if it is one
    bool gives_way = false;  // of two ranks that find themselves on one core, whether this one leaves it
};

// Returns when done(), which is not called again once it was true: it may take what it waits for. check(seconds waited
// so far) is called before each sleep; what it throws ends the wait. Whoever makes done() true does so, then looks for
// sleepers, then changes the word and wakes them; the first two sequentially consistent, so that either the waker sees
// the sleeper or the sleeper sees what it waits for.
void wait_until(const WaitPoint& point, const std::function<bool()>& done, const std::function<void(double)>& check,
                Patience& patience);

// A clock that one rank advances and the others wait for. Lives in shared memory; `sleepers` stands apart so that
// counting sleepers does not disturb who reads the value.
struct Clock {
    std::atomic<uint32_t>& value;
    std::atomic<uint32_t>& sleepers;
    std::atomic<int32_t>& core;  // on which its rank was when it advanced it
    bool gives_way = false;      // as above

    bool reached(uint32_t target) const {
        return static_cast<int32_t>(value.load(std::memory_order_acquire) - target) >= 0;  // wraps around
    }
    void post(uint32_t target) const;  // by the owner only
    void wake() const;                 // everyone asleep looks again
};

// A bell that any rank rings and one rank listens to.
struct Bell {
    std::atomic<uint32_t>& rings;
    std::atomic<uint32_t>& sleepers;

    void ring() const;  // after a sequentially consistent store of the news
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

void wait_until_reached(const Clock& clock, uint32_t target, const std::function<void(double)>& check,
                        Patience& patience);

}  // namespace pycomm
