#include "transport/shared_memory.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "transport/call.h"

namespace pycomm {
namespace {

// A forked child (a DataLoader worker) must not keep this rank's sockets open: its peers would not notice a death. It
// keeps the mappings, so arrays in them stay readable.
class ForkGuard {
   public:
    static ForkGuard& instance() {
        static ForkGuard* guard = new ForkGuard;  // never destroyed: groups may outlive static destruction
        return *guard;
    }
    void add(std::vector<int>* descriptors) {
        std::lock_guard<std::mutex> lock(mutex_);
        lists_.insert(descriptors);
    }
    void remove(std::vector<int>* descriptors) {
        std::lock_guard<std::mutex> lock(mutex_);
        lists_.erase(descriptors);
    }

   private:
    ForkGuard() {
        pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                       [] {
                           for (std::vector<int>* list : instance().lists_) {
                               for (int& fd : *list) {
                                   if (fd >= 0) ::close(fd);
                                   fd = -1;
                               }
                           }
                           instance().mutex_.unlock();
                       });
    }
    std::mutex mutex_;
    std::set<std::vector<int>*> lists_;
};

bool connection_closed(int socket) {
    pollfd state{socket, POLLRDHUP, 0};
    return poll(&state, 1, 0) > 0 && (state.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

void copy_text(char* to, size_t room, const std::string& text) {
    size_t length = std::min(room - 1, text.size());
    while (length < text.size() && length > 0 && (text[length] & 0xC0) == 0x80) --length;  // no half of a character
    std::memcpy(to, text.data(), length);
    to[length] = '\0';
}

std::string describe(const Operation& operation, const char* algorithm) {
    constexpr const char* kKinds[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier",
                                      "",           "all_reduce",     "all_to_all"};
    constexpr const char* kOps[] = {"sum", "mean", "min", "max"};
    std::string kind = kKinds[static_cast<int>(operation.kind)];
    std::string what = format("%lld elements of %s", static_cast<long long>(operation.count), name_of(operation.dtype));
    switch (operation.kind) {
        case Kind::kAllReduce:
        case Kind::kReduceScatter:
            return kind + "(" + what + ", op=\"" + kOps[static_cast<int>(operation.op)] + "\")";
        case Kind::kProgram:
            return kind + "(" + what + ", op=\"" + kOps[static_cast<int>(operation.op)] + "\", algorithm=\"" +
                   algorithm + format("\" with digest %016llx)", static_cast<unsigned long long>(operation.schedule));
        case Kind::kBroadcast:
            return kind + "(" + what + format(", src=%d)", operation.root);
        case Kind::kAllGather:
        case Kind::kAllToAll:
            return kind + "(" + what + ")";
        default:
            return kind + "()";
    }
}

}  // namespace

int64_t shared_file_bytes(int size) {
    // A rank can never use more than the machine has; all ranks' files together must fit in the address space.
    int64_t physical = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    constexpr int64_t kHuge = 2 << 20;
    int64_t limit = (int64_t{1} << 45) / size;
    return std::min(physical + header_bytes(size), limit) / kHuge * kHuge;
}

SharedMemoryGroup::SharedMemoryGroup(int rank, int size, std::vector<int> memory, std::vector<int> sockets,
                                     int64_t file_bytes, std::function<void()> check_signals)
    : rank_(rank),
      size_(size),
      sockets_(std::move(sockets)),
      peers_(static_cast<size_t>(size)),
      check_signals_(std::move(check_signals)),
      pid_(getpid()) {
    ForkGuard::instance().add(&sockets_);
    try {
        for (int p = 0; p < size; ++p) {
            int fd = std::exchange(memory[static_cast<size_t>(p)], -1);
            if (p == rank) {
                arena_ = std::make_shared<Arena>(fd, file_bytes, header_bytes(size));
            } else {
                std::unique_ptr<int, void (*)(int*)> closer(&fd, [](int* f) { ::close(*f); });
                peers_[static_cast<size_t>(p)] = std::make_unique<Mapping>(fd, file_bytes);
            }
        }
    } catch (...) {
        for (int fd : memory) {
            if (fd >= 0) ::close(fd);
        }
        close_descriptors();
        throw;
    }
}

SharedMemoryGroup::~SharedMemoryGroup() { close("it dropped its communicator"); }

void SharedMemoryGroup::break_for_good(uint32_t failed_step, const std::string& why) {
    if (!broken_.empty()) return;  // the first reason is the one to tell
    broken_ = why;
    Control& mine = *reinterpret_cast<Control*>(base(rank_));
    mine.failed_step = failed_step;
    copy_text(mine.why, sizeof mine.why, why);
    mine.gave_up.store(1, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // before the caller writes over what others read
    Clock{mine.clock, mine.sleepers}.wake();
}

void SharedMemoryGroup::close_descriptors() {
    ForkGuard::instance().remove(&sockets_);
    for (int& fd : sockets_) {
        if (fd >= 0) ::close(fd);
        fd = -1;
    }
}

void SharedMemoryGroup::close(const std::string& why) {
    if (getpid() != pid_) return;  // a forked child: the parent's group is not its to close
    closing_ = true;
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
    break_for_good(clock_ + 1, "rank " + std::to_string(rank_) + ": " + why);
    close_descriptors();
    peers_.clear();
    arena_.reset();  // its blocks keep it, if there are any
}

std::shared_ptr<Arena> SharedMemoryGroup::arena() const {
    if (arena_ != nullptr) return arena_;
    throw CommFailure(rank_, -1, "empty", 0.0, "empty: this communicator is closed");
}

Call::Call(SharedMemoryGroup& group, const char* name, double timeout)
    : group_(group), lock_(group.mutex_), name_(name), timeout_(timeout), slot_(group.num_calls_ & 1) {
    if (getpid() != group.pid_) {
        throw CommFailure(rank(), -1, name, 0.0,
                          format("%s: this communicator belongs to process %d and was inherited by a fork; make one in "
                                 "the new process",
                                 name, group.pid_));
    }
    if (!group.broken_.empty()) {
        throw CommFailure(rank(), -1, name, 0.0,
                          format("%s: this communicator is %s (%s)", name,
                                 group.closed_ ? "closed" : "broken since an earlier failure", group.broken_.c_str()));
    }
    await_all();  // at once, except after a refusal that nobody had come for: its announcement must be read first
}

void Call::post_announcement(Operation mine) {
    ++group_.num_calls_;
    control(rank()).announced[slot_] = mine;
    clock_of(rank()).post(++group_.clock_);
}

void Call::announce(Operation mine) {
    post_announcement(mine);
    await_all();
    compare();
}

void Call::step() {
    clock_of(rank()).post(++group_.clock_);
    await_all();
}

void Call::await_all() {
    for (int p = 0; p < size(); ++p) {
        if (p == rank()) continue;
        Clock clock = clock_of(p);
        if (clock.reached(group_.clock_)) continue;
        wait_until_reached(clock, group_.clock_, [&](double waited) { check(p, waited); });
    }
    require_nobody_gave_up();
}

void Call::require_nobody_gave_up() {
    // A peer may have taken part in this step without living to see its end. Its own call failed, so this one does too.
    for (int p = 0; p < size(); ++p) {
        if (p != rank() && gave_up_by_now(p)) fail(p, 0.0, format("rank %d gave up (%s)", p, control(p).why));
    }
}

void Call::begin_messages() { ++group_.clock_; }

void Call::end_messages() {
    // What was read before is not younger than what is seen now; the other side is in break_for_good.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    require_nobody_gave_up();
    clock_of(rank()).post(group_.clock_);
}

void Call::await_messages(const std::function<int()>& peer, const std::function<bool()>& done) {
    const Bell bell = bell_of(rank());
    wait_until({bell.rings, bell.sleepers}, done, [&](double waited) { check(peer(), waited); });
}

void Call::refuse(const std::string& reason) {
    copy_text(control(rank()).refusal[slot_], sizeof control(rank()).refusal[0], reason);
    post_announcement({.kind = Kind::kRefused});
}

void Call::name_algorithm(const std::string& name) {
    copy_text(control(rank()).algorithm[slot_], sizeof control(rank()).algorithm[0], name);
}

bool Call::gave_up_by_now(int p) const {
    // A peer that ended this step and then closed its communicator is no failure of this step.
    const Control& theirs = control(p);
    return theirs.gave_up.load(std::memory_order_acquire) != 0 &&
           static_cast<int32_t>(theirs.failed_step - group_.clock_) <= 0;
}

void Call::check(int waiting_for, double waited) {
    for (int p = 0; p < size(); ++p) {
        if (p == rank()) continue;
        bool closed = connection_closed(group_.sockets_[static_cast<size_t>(p)]);
        bool gave_up = control(p).gave_up.load(std::memory_order_acquire) != 0;
        // Looked at last: a peer that ended this step and then left is no failure of this step.
        if (clock_of(p).reached(group_.clock_)) continue;
        if (gave_up) fail(p, waited, format("rank %d gave up (%s)", p, control(p).why));
        if (closed) fail(p, waited, format("rank %d died (its connection is closed)", p));
    }
    if (group_.closing_) fail(-1, waited, "the communicator was closed meanwhile");
    if (waited > timeout_) fail(waiting_for, waited, format("timed out waiting for rank %d", waiting_for));
    try {
        group_.check_signals_();
    } catch (...) {
        group_.break_for_good(group_.clock_, format("rank %d: interrupted in %s", rank(), name_));
        throw;
    }
}

void Call::fail(int peer, double waited, const std::string& what) {
    std::string text = format("rank %d: %s: %s after %.2f s", rank(), name_, what.c_str(), waited);
    group_.break_for_good(group_.clock_, text);
    throw CommFailure(rank(), peer, name_, waited, text);
}

void Call::compare() const {
    for (int p = 0; p < size(); ++p) {
        if (announced(p).kind != Kind::kRefused) continue;
        throw ArgumentError(format("%s: rank %d could not take part: %s", name_, p, control(p).refusal[slot_]));
    }
    for (int p = 1; p < size(); ++p) {
        if (announced(p).agrees_with(announced(0))) continue;
        auto call_of = [&](int q) { return describe(announced(q), control(q).algorithm[slot_]); };
        throw ArgumentError(format("the ranks disagree: rank %d called %s where rank 0 called %s", p,
                                   call_of(p).c_str(), call_of(0).c_str()));
    }
}

bool Call::all_in_arenas() const {
    for (int p = 0; p < size(); ++p) {
        if (announced(p).offset < 0) return false;
    }
    return true;
}

void SharedMemoryGroup::refuse(const std::string& reason, double timeout) {
    Call(*this, "refuse", timeout).refuse(reason);
}

}  // namespace pycomm
