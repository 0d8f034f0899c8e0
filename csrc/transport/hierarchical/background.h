// Jobs of one operation on a thread of their own, in order.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "base/signals.h"
#include "transport/group.h"

namespace pycomm {

class Background {
   public:
    // Calls job(0) ... job(count - 1), each once it is allowed.
    Background(int count, std::function<void(int)> job) : job_(std::move(job)) {
        const SignalsBlocked blocked;
        thread_ = std::thread([this, count] { run(count); });
    }
    ~Background() {
        stop();
        thread_.join();
    }
    Background(const Background&) = delete;
    Background& operator=(const Background&) = delete;

    // Allows all jobs up to `i`.
    void allow(int i) {
        const std::lock_guard<std::mutex> lock(mutex_);
        allowed_ = i + 1;
        changed_.notify_all();
    }
    // Waits for job `i`, and throws what it, or one before it, threw. check(): called from time to time; what it throws
    // ends the wait.
    void await(int i, const std::function<void()>& check) {
        std::unique_lock<std::mutex> lock(mutex_);
        auto is_done = [&] { return done_ > i || failure_ != nullptr; };
        if (!is_done()) {
            lock.unlock();
            before_long_wait();
            lock.lock();
        }
        while (!changed_.wait_for(lock, std::chrono::milliseconds(100), is_done)) {
            lock.unlock();
            check();
            lock.lock();
        }
        if (done_ <= i) std::rethrow_exception(failure_);
    }
    // No further job begins.
    void stop() {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_stopped_ = true;
        changed_.notify_all();
    }

   private:
    void run(int count) {
        for (int i = 0; i < count; ++i) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                changed_.wait(lock, [&] { return allowed_ > i || is_stopped_; });
                if (is_stopped_) return;
            }
            std::exception_ptr failure;
            try {
                job_(i);
            } catch (...) {
                failure = std::current_exception();
            }
            const std::lock_guard<std::mutex> lock(mutex_);
            failure_ = failure;
            if (failure == nullptr) done_ = i + 1;
            changed_.notify_all();
            if (failure != nullptr) return;
        }
    }

    const std::function<void(int)> job_;
    std::mutex mutex_;  // of what follows
    std::condition_variable changed_;
    int allowed_ = 0, done_ = 0;
    bool is_stopped_ = false;
    std::exception_ptr failure_;
    std::thread thread_;
};

}  // namespace pycomm
