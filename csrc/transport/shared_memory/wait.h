// Waiting for what another rank does: for its clock to reach a step, or for anything it then rings a bell about.
//
// A waiter pauses a few times, then yields, then sleeps on a futex in slices. Ranks may outnumber cores, so pausing
// must stay short: the rank that is waited for may need this very core. Between slices the caller's check() runs, which
// looks for dead peers and signals and throws to end the wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace pycomm {

// A word in shared memory on which to sleep. `sleepers` keeps the waker from a system call when nobody sleeps.
struct WaitPoint {
    std::atomic<uint32_t>& word;  // changes before anybody is woken
    std::atomic<uint32_t>& sleepers;
};

// Returns when done(), which is not called again once it was true: it may take what it waits for. check(seconds waited
// so far) is called before each sleep; what it throws ends the wait. Whoever makes done() true does so, then looks for
// sleepers, then changes the word and wakes them; the first two sequentially consistent, so that either the waker sees
// the sleeper or the sleeper sees what it waits for.
void wait_until(const WaitPoint& point, const std::function<bool()>& done, const std::function<void(double)>& check);

// A clock that one rank advances and the others wait for. Lives in shared memory; `sleepers` stands apart so that
// counting sleepers does not disturb who reads the value.
struct Clock {
    std::atomic<uint32_t>& value;
    std::atomic<uint32_t>& sleepers;

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

void wait_until_reached(const Clock& clock, uint32_t target, const std::function<void(double)>& check);

}  // namespace pycomm
