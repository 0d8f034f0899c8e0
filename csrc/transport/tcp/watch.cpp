#include "transport/tcp/watch.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/signals.h"
#include "base/time.h"
#include "transport/at_fork.h"

namespace pycomm {
namespace {

constexpr double kTickSeconds = 1.0;
constexpr int kMostEvents = 64;

class Watch final : public ForkAware {
   public:
    // Of this process. A forked child has its own: the thread was not forked.
    static Watch& instance() {
        Watch* found = current_.load();
        if (found != nullptr) return *found;
        auto* made = new Watch;  // never destroyed: groups may outlive static destruction
        if (current_.compare_exchange_strong(found, made)) {
            watch_forks(made);
            return *made;
        }
        delete made;  // another thread was faster
        return *found;
    }

    void add(WatchedSockets* object, int index, int socket) {
        std::lock_guard<std::mutex> threads(threads_);
        start();
        std::lock_guard<std::mutex> lock(mutex_);
        const uint64_t key = ++last_key_;
        entries_[key] = {object, index, socket};
        {
            std::lock_guard<std::mutex> keys(keys_mutex_);
            keys_[socket] = key;
        }
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = key;
        if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event) != 0) {
            entries_.erase(key);
            throw DeviceError(format("a connection cannot be watched: error %d of epoll_ctl", errno));
        }
    }

    void want_room(int socket, bool wanted) {
        std::lock_guard<std::mutex> lock(keys_mutex_);
        epoll_event event{};
        event.events = EPOLLIN | (wanted ? EPOLLOUT : 0U);
        const auto found = keys_.find(socket);
        if (found == keys_.end()) return;
        event.data.u64 = found->second;
        epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, socket, &event);
    }

    void remove(WatchedSockets* object) {
        std::lock_guard<std::mutex> threads(threads_);
        {
            std::lock_guard<std::mutex> lock(mutex_);  // not while it is being called
            for (auto entry = entries_.begin(); entry != entries_.end();) {
                if (entry->second.object != object) {
                    ++entry;
                    continue;
                }
                std::lock_guard<std::mutex> keys(keys_mutex_);
                epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, entry->second.socket, nullptr);
                keys_.erase(entry->second.socket);
                entry = entries_.erase(entry);
            }
            if (!entries_.empty() || !thread_.joinable()) return;
            ends_ = true;
        }
        wake();
        thread_.join();
        ends_ = false;
    }

    void before_fork() override {}
    void after_fork_in_parent() override {}
    void after_fork_in_child() override { current_ = nullptr; }

   private:
    struct Entry {
        WatchedSockets* object;
        int index, socket;
    };

    void start() {
        if (thread_.joinable()) return;
        if (!epoll_.is_open()) {
            epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
            waker_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
            epoll_event event{};
            event.events = EPOLLIN;
            event.data.u64 = 0;
            if (!epoll_.is_open() || !waker_.is_open() ||
                epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, waker_.get(), &event) != 0) {
                epoll_.close();
                throw DeviceError(format("connections cannot be watched: error %d of epoll", errno));
            }
        }
        const SignalsBlocked blocked;
        thread_ = std::thread([this] { run(); });
        pthread_setname_np(thread_.native_handle(), "pycomm-watch");
    }

    void wake() {
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t written = write(waker_.get(), &one, sizeof one);
    }

    void run() {
        epoll_event events[kMostEvents];
        double next_tick = monotonic_seconds() + kTickSeconds;
        while (true) {
            const double left = next_tick - monotonic_seconds();
            const int count =
                epoll_wait(epoll_.get(), events, kMostEvents, left > 0 ? static_cast<int>(1e3 * left) + 1 : 0);
            std::lock_guard<std::mutex> lock(mutex_);
            if (ends_) break;
            for (int i = 0; i < count; ++i) {
                const auto entry = entries_.find(events[i].data.u64);  // it may have been removed meanwhile
                if (entry != entries_.end()) entry->second.object->on_ready(entry->second.index);
            }
            if (monotonic_seconds() < next_tick) continue;
            next_tick = monotonic_seconds() + kTickSeconds;
            WatchedSockets* last = nullptr;
            for (const auto& [key, entry] : entries_) {
                if (entry.object != last) entry.object->on_tick();
                last = entry.object;
            }
        }
        uint64_t count;
        [[maybe_unused]] const ssize_t got = read(waker_.get(), &count, sizeof count);
    }

    static inline std::atomic<Watch*> current_{nullptr};
    std::mutex threads_;                 // one change of the thread at a time
    std::mutex mutex_;                   // held while objects are called
    std::mutex keys_mutex_;              // the last of all locks to be taken
    std::map<uint64_t, Entry> entries_;  // the entries of an object are consecutive
    std::map<int, uint64_t> keys_;       // by socket
    uint64_t last_key_ = 0;
    Descriptor epoll_, waker_;
    std::thread thread_;
    bool ends_ = false;
};

}  // namespace

void watch(WatchedSockets* object, int index, int socket) { Watch::instance().add(object, index, socket); }

void watch_for_room(int socket, bool wanted) { Watch::instance().want_room(socket, wanted); }

void unwatch(WatchedSockets* object) { Watch::instance().remove(object); }

}  // namespace pycomm
