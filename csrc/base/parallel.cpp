#include "base/parallel.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace pycomm {
namespace {

class Pool {
   public:
    void run(int num_tasks, int num_threads, const std::function<void(int)>& task) {
        std::unique_lock<std::mutex> exclusive(in_use_, std::try_to_lock);
        if (!exclusive.owns_lock() || num_threads <= 1 || num_tasks <= 1) {
            for (int i = 0; i < num_tasks; ++i) task(i);
            return;
        }
        int helpers = std::min(num_threads, num_tasks) - 1;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (num_workers_ < helpers) {
                std::thread([this, index = num_workers_] { work(index); }).detach();
                ++num_workers_;
            }
            task_ = &task;
            num_tasks_ = num_tasks;
            next_task_ = 0;
            num_wanted_ = helpers;
            num_busy_ = helpers;
            ++generation_;
        }
        wake_.notify_all();
        take_tasks();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return num_busy_ == 0; });
    }

   private:
    void take_tasks() {
        for (int i; (i = next_task_.fetch_add(1)) < num_tasks_;) (*task_)(i);
    }

    void work(int index) {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return generation_ != seen; });
            seen = generation_;
            if (index >= num_wanted_) continue;
            lock.unlock();
            take_tasks();
            lock.lock();
            if (--num_busy_ == 0) done_.notify_one();
        }
    }

    std::mutex in_use_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    const std::function<void(int)>* task_ = nullptr;
    std::atomic<int> next_task_{0};
    int num_tasks_ = 0, num_workers_ = 0, num_wanted_ = 0, num_busy_ = 0;
    uint64_t generation_ = 0;
};

// Never destroyed: its detached workers may outlive static destruction. A forked child has none of the workers and may
// have inherited a locked mutex, so it starts over with a fresh pool.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { the_pool = nullptr; });
    (void)registered;
    Pool* current = the_pool.load();
    if (current != nullptr) return *current;
    Pool* fresh = new Pool;
    if (the_pool.compare_exchange_strong(current, fresh)) return *fresh;
    delete fresh;
    return *current;
}

}  // namespace

void parallel_for(int num_tasks, int num_threads, const std::function<void(int)>& task) {
    if (num_threads <= 1 || num_tasks <= 1) {
        for (int i = 0; i < num_tasks; ++i) task(i);
        return;
    }
    pool().run(num_tasks, num_threads, task);
}

}  // namespace pycomm
