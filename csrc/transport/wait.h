// Waiting for another rank's clock to reach a step.
//
// A waiter pauses a few times, then yields, then sleeps on a futex in slices. Ranks may outnumber cores, so pausing
// must stay short: the rank that is waited for may need this very core. Between slices the caller's check() runs, which
// looks for dead peers and signals and throws to end the wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace pycomm {

// A clock that one rank advances and the others wait for. Lives in shared memory; `sleepers` keeps the poster from a
// system call when nobody sleeps, and stands apart so that counting sleepers does not disturb who reads the value.
struct Clock {
    std::atomic<uint32_t>& value;
    std::atomic<uint32_t>& sleepers;

    bool reached(uint32_t target) const {
        return static_cast<int32_t>(value.load(std::memory_order_acquire) - target) >= 0;  // wraps around
    }
    void post(uint32_t target) const;  // by the owner only
    void wake() const;                 // everyone asleep looks again
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

double monotonic_seconds();

// Returns when the clock reached target. check(seconds waited so far) is called before each sleep; what it throws ends
// the wait.
void wait_until_reached(const Clock& clock, uint32_t target, const std::function<void(double)>& check);

}  // namespace pycomm
