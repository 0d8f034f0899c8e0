#include "transport/shared_memory/group.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "transport/cores.h"
#include "transport/process.h"
#include "transport/shared_memory/call.h"
#include "transport/shared_memory/messages.h"
#include "transport/texts.h"

namespace pycomm {
namespace {

constexpr unsigned kLockPollMicroseconds = 1000;

}  // namespace

int64_t shared_file_bytes(int size) {
    if (size < 1) throw ArgumentError(format("size is %d, wanted at least 1", size));
    // A rank can never use more than the machine has; all ranks' files together must fit in the address space.
    int64_t physical = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    constexpr int64_t kHuge = 2 << 20;
    int64_t limit = (int64_t{1} << 45) / size;
    return std::min(physical + header_bytes(size), limit) / kHuge * kHuge;
}

std::shared_ptr<Arena> make_arena(Descriptor file, int size, int64_t file_bytes) {
    if (file_bytes <= header_bytes(size)) throw ArgumentError("file_bytes is too small for a group of this size");
    return std::make_shared<Arena>(std::move(file), file_bytes, header_bytes(size));
}

SharedMemoryGroup::SharedMemoryGroup(int rank, std::shared_ptr<Arena> arena,
                                     std::vector<std::shared_ptr<Mapping>> peers, std::vector<Descriptor> sockets,
                                     std::function<void()> check_signals, std::vector<int> names)
    : rank_(rank),
      size_(static_cast<int>(peers.size())),
      sockets_(std::move(sockets)),
      peers_(std::move(peers)),
      file_bytes_(arena->mapping()->num_bytes()),
      check_signals_(std::move(check_signals)),
      arena_(std::move(arena)),
      slacks_(peers_.size(), -1.0),
      announced_(peers_.size()),
      names_(std::move(names)),
      pid_(getpid()) {
    for (int p = 0; p < size_; ++p) {
        bases_.push_back(p == rank ? arena_->data() : peers_[static_cast<size_t>(p)]->data());
        pids_.push_back(peer_of(sockets_[static_cast<size_t>(p)].get()));
    }
    look_at_cores();
    control(rank).awaited = -1;
    messages_ = std::make_unique<Messages>(*this);
    watch_forks(this);
}

SharedMemoryGroup::~SharedMemoryGroup() {
    close("it dropped its communicator");
    unwatch_forks(this);
}

Control& SharedMemoryGroup::control(int p) const { return *reinterpret_cast<Control*>(base(p)); }

void SharedMemoryGroup::look_at_cores() {
    std::vector<pid_t> peers;
    for (int p = 0; p < size_; ++p) {
        if (p != rank_) peers.push_back(pids_[static_cast<size_t>(p)]);
    }
    const bool crowded = !have_a_core_each(peers);
    for (Patience* each : {&for_others_, &between_steps_, &for_messages_}) each->set_crowded(crowded);
}

int SharedMemoryGroup::cause_of(int p) const {
    std::vector<bool> seen(static_cast<size_t>(size_), false);
    int first = p;
    for (int at = p;;) {
        seen[static_cast<size_t>(at)] = true;
        const Control& theirs = control(at);
        int next = theirs.gave_up.load(std::memory_order_acquire) != 0 ? theirs.failed_peer : -1;
        if (next < 0) next = theirs.lost.load(std::memory_order_acquire) - 1;
        if (next < 0 || next >= size_ || next == rank_) return at;
        if (seen[static_cast<size_t>(next)]) return first;  // they name each other
        if (at == p) first = next;
        at = next;
    }
}

void SharedMemoryGroup::break_for_good(uint32_t failed_step, int failed_peer, const std::string& why) {
    if (!broken_.empty()) return;  // the first reason is the one to report
    broken_ = why;
    failed_peer_ = failed_peer;
    Control& mine = control(rank_);
    mine.failed_step = failed_step;
    mine.failed_peer = failed_peer;
    copy_text(mine.why, sizeof mine.why, why);
    mine.gave_up.store(1, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // before the caller overwrites memory that others read
    Clock{mine.clock, mine.sleepers, mine.core}.wake();
}

void SharedMemoryGroup::after_fork_in_child() {
    for (Descriptor& socket : sockets_) socket.close();
    for (const std::shared_ptr<Mapping>& peer : peers_) {
        if (peer != nullptr) peer->withdraw(Descriptor(), 0);
    }
}

void SharedMemoryGroup::close(const std::string& why) {
    if (getpid() != pid_) return;  // a forked child must not close its parent's group
    closing_ = true;
    if (busy_ == std::this_thread::get_id()) {
        if (closed_within_.empty()) closed_within_ = why;
        return;
    }
    if (messages_->postpone_close(why)) return;
    std::lock_guard<std::mutex> lock(mutex_);
    close_with_lock(why);
}

void SharedMemoryGroup::close_with_lock(const std::string& why) {
    if (closed_) return;
    closed_ = true;
    break_for_good(clock_ + 1, -1, "rank " + std::to_string(name_of(rank_)) + ": " + why);
    unwatch_forks(this);
    messages_->end(why);
    sockets_.clear();
    std::lock_guard<std::mutex> lock(arena_mutex_);
    peers_.clear();
    arena_.reset();  // blocks that are still in use keep it alive
}

std::shared_ptr<Arena> SharedMemoryGroup::arena() const {
    require_own_process(name_of(rank_), "empty", pid_);
    std::lock_guard<std::mutex> lock(arena_mutex_);
    if (arena_ != nullptr) return arena_;
    throw CommFailure(name_of(rank_), -1, "empty", 0.0, "empty: this communicator is closed");
}

int64_t SharedMemoryGroup::offset_of(const Buffer& x) const {
    int64_t offset = x.bytes() - base(rank_);
    return offset >= 0 && offset <= file_bytes_ - x.num_bytes() ? offset : -1;
}

std::shared_ptr<Mapping> SharedMemoryGroup::mapping(int p) const {
    require_own_process(name_of(rank_), "empty", pid_);
    std::lock_guard<std::mutex> lock(arena_mutex_);
    if (arena_ == nullptr) throw CommFailure(name_of(rank_), -1, "empty", 0.0, "empty: this communicator is closed");
    return p == rank_ ? arena_->mapping() : peers_[static_cast<size_t>(p)];
}

void SharedMemoryGroup::lock_for_operation(std::unique_lock<std::mutex>& lock, const char* name) {
    require_own_process(name_of(rank_), name, pid_);
    if (busy_ == std::this_thread::get_id() || messages_->is_inside()) {
        throw CommFailure(name_of(rank_), -1, name, 0.0,
                          format("%s: called by a signal handler while this thread is in another operation", name));
    }
    lock = std::unique_lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) before_long_wait();
    while (!lock.owns_lock()) {  // lock() would keep signal handlers from running
        usleep(kLockPollMicroseconds);
        check_signals_();
        lock.try_lock();
    }
    busy_.store(std::this_thread::get_id(), std::memory_order_relaxed);  // compared by this thread only
}

void SharedMemoryGroup::refuse(const std::string& reason, double timeout) {
    Call(*this, "refuse", timeout).refuse(reason);
}

}  // namespace pycomm
