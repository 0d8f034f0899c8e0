#include "transport/shared_memory/call.h"

#include <unistd.h>

#include <algorithm>

#include "base/time.h"
#include "transport/process.h"
#include "transport/texts.h"

namespace pycomm {
namespace {

constexpr float kMostSlack = 1e9f;
constexpr double kSlackWeight = 0.25;  // of the latest wait

// The fields of this transport included.
bool is_possible(const Operation& operation, int size, int64_t file_bytes) {
    if (!is_possible(operation, size)) return false;
    if (operation.is_apart != 0 && (operation.is_apart != 1 || operation.offset < 0)) return false;
    if (operation.staging < 0 || operation.staging >= kNumStagings) return false;
    if (!(operation.slack >= -1.0f && operation.slack <= kMostSlack)) return false;  // also rejects NaN
    const int64_t width = operation.array_width();
    auto lies_in_arena = [&](int64_t offset) {
        if (offset == -1) return true;
        if (offset < header_bytes(size) || offset > file_bytes) return false;
        return operation.count <= (file_bytes - offset) / width;
    };
    return lies_in_arena(operation.offset) && lies_in_arena(operation.shadow);
}

}  // namespace

Call::Call(SharedMemoryGroup& group, const char* name, double timeout)
    : group_(group), name_(name), timeout_(timeout), slot_(0), next_look_(kLookSeconds) {
    group.lock_for_operation(lock_, name);
    try {
        if (!group.broken_.empty()) {
            throw CommFailure(
                group.name_of(rank()), group.name_of(group.failed_peer_), name, 0.0,
                format("%s: this communicator is %s (%s)", name,
                       group.closed_ ? "closed" : "broken since an earlier failure", group.broken_.c_str()));
        }
        slot_ = group.num_calls_ & 1;
        note_largest(0.0f);
        await_all();  // returns at once, except after a refusal that some rank has not read yet
    } catch (...) {
        leave();
        throw;
    }
}

Call::~Call() { leave(); }

void Call::leave() {
    group_.busy_.store(std::thread::id(), std::memory_order_relaxed);
    if (!group_.closed_within_.empty()) group_.close_with_lock(group_.closed_within_);
}

void Call::post_announcement(Operation mine) {
    ++group_.num_calls_;
    control(rank()).announced[slot_] = mine;
    clock_of(rank()).post(++group_.clock_);
}

void Call::announce(Operation mine) {
    const bool is_large = mine.count * size_of(mine.dtype) >= kUnequalBytes;
    mine.staging = static_cast<int16_t>(group_.staging_.next());
    if (!group_.for_others_.crowded()) {
        mine.slack = static_cast<float>(std::min<double>(group_.slack_, kMostSlack));
    }
    const double start = is_large ? monotonic_seconds() : 0.0;
    post_announcement(mine);
    await_all();
    if (is_large) group_.slack_ += kSlackWeight * (monotonic_seconds() - start - group_.slack_);
    is_under_way_ = true;
    take_announcements(mine);
    compare();
    if (is_large) {
        slacks_ = group_.slacks_;
        for (int p = 0; p < size(); ++p) group_.slacks_[static_cast<size_t>(p)] = announced(p).slack;
    }
}

void Call::take_announcements(const Operation& mine) {
    for (int p = 0; p < size(); ++p) {
        Operation& taken = group_.announced_[static_cast<size_t>(p)];
        if (p == rank()) {
            taken = mine;
            continue;
        }
        std::memcpy(&taken, &control(p).announced[slot_], sizeof taken);
        if (is_possible(taken, size(), group_.file_bytes_)) continue;
        distrust(p);
    }
}

bool Call::may_hold_array(int64_t offset, int64_t num_bytes) const {
    const int64_t mailbox_at = kControlBytes + slot_ * kMailboxBytes;
    auto lies_within = [&](int64_t begin, int64_t end) {
        return offset >= begin && offset <= end && num_bytes <= end - offset;
    };
    return lies_within(mailbox_at, mailbox_at + kMailboxBytes) || lies_within(header_bytes(size()), group_.file_bytes_);
}

void Call::step() {
    clock_of(rank()).post(++group_.clock_);
    await_all();
}

void Call::await_all() {
    // A rank that is ahead has changed its clock's line again: looking at it would cost a transfer between cores.
    for (int p = group_.all_reached_ == group_.clock_ ? size() : 0; p < size(); ++p) {
        if (has_arrived(p)) continue;
        next_look_ = kLookSeconds;
        wait_until_reached(clock_of(p), group_.clock_, [&](double waited) { check(p, waited); }, patience());
        control(rank()).awaited.store(-1, std::memory_order_relaxed);
    }
    group_.all_reached_ = group_.clock_;
    require_nobody_gave_up();
}

void Call::require_nobody_gave_up() {
    // Orders all reads of others' memory before the checks below: a rank that gave up may write to its memory again.
    std::atomic_thread_fence(std::memory_order_acquire);
    // A peer may have taken part in this step and then failed before its end. Its own call failed, so this one must
    // too.
    for (int p = 0; p < size(); ++p) {
        if (p != rank() && gave_up_by_now(p)) fail_with(p, 0.0);
    }
}

void Call::begin_messages() { ++group_.clock_; }

void Call::end_messages() {
    // Orders the reads of this step before the check; pairs with the fence in break_for_good.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    require_nobody_gave_up();
    clock_of(rank()).post(group_.clock_);
}

void Call::await_messages(const std::function<int()>& peer, const std::function<bool()>& done) {
    const Bell bell = bell_of(rank());
    next_look_ = kLookSeconds;
    wait_until({bell.rings, bell.sleepers}, done, [&](double waited) { check(peer(), waited); }, patience());
    control(rank()).awaited.store(-1, std::memory_order_relaxed);
}

void Call::refuse(const std::string& reason) {
    copy_text(control(rank()).refusal[slot_], sizeof control(rank()).refusal[0], reason);
    post_announcement({.kind = Kind::kRefused});
}

void Call::name_algorithm(const std::string& name) {
    copy_text(control(rank()).algorithm[slot_], sizeof control(rank()).algorithm[0], name);
}

bool Call::gave_up_by_now(int p) const {
    // A peer that closed its communicator after it ended this step does not make the step fail.
    const Control& theirs = control(p);
    return theirs.gave_up.load(std::memory_order_acquire) != 0 &&
           static_cast<int32_t>(theirs.failed_step - group_.clock_) <= 0;
}

void Call::check(int waiting_for, double waited) {
    control(rank()).awaited.store(waiting_for, std::memory_order_relaxed);
    int gave_up = -1, died = -1;
    for (int p = 0; p < size(); ++p) {
        if (p == rank()) continue;
        bool closed = connection_closed(group_.sockets_[static_cast<size_t>(p)].get());
        bool says_so = control(p).gave_up.load(std::memory_order_acquire) != 0;
        // Checked last: a peer that left after it ended this step does not make the step fail.
        if (has_arrived(p)) continue;
        if (says_so && gave_up < 0) gave_up = p;
        if (closed && !says_so && died < 0) died = p;
    }
    // A death explains why others gave up, so it is reported first.
    if (died >= 0) fail(died, waited, format("rank %d died (its connection is closed)", group_.name_of(died)));
    if (gave_up >= 0) fail_with(gave_up, waited);
    if (group_.closing_) fail(-1, waited, "the communicator was closed meanwhile");
    if (waited > timeout_) time_out(waiting_for, waited);
    if (waited > next_look_) look_at_processes(waited);
    try {
        group_.check_signals_();
        require_own_process(group_.name_of(rank()), name_, group_.pid_);  // a handler may have forked
    } catch (...) {
        if (getpid() != group_.pid_) throw;
        group_.break_for_good(group_.clock_, -1, format("rank %d: interrupted in %s", group_.name_of(rank()), name_));
        throw;
    }
}

// A process that is dumping core keeps its connections open until the dump is written.
void Call::look_at_processes(double waited) {
    next_look_ = waited + kLookSeconds;
    group_.look_at_cores();
    int stopped = -1;
    for (int p = 0; p < size(); ++p) {
        if (has_arrived(p)) continue;
        const ProcessState state = state_of(group_.pids_[static_cast<size_t>(p)]);
        if (state == ProcessState::kDumpingCore) fail(p, waited, format("rank %d is dumping core", group_.name_of(p)));
        if (state == ProcessState::kStopped && stopped < 0) stopped = p;
    }
    look_at_stopped(stopped, waited);
}

void Call::look_at_stopped(int p, double waited) {
    if (p < 0 || p != stopped_ || waited < stopped_since_) stopped_since_ = waited;
    stopped_ = p;
    if (p >= 0 && waited - stopped_since_ >= group_.stopped_patience_) {
        fail(p, waited, format("rank %d is stopped", group_.name_of(p)));
    }
}

void Call::time_out(int waiting_for, double waited) {
    for (int p = 0; p < size(); ++p) {
        if (has_arrived(p) || state_of(group_.pids_[static_cast<size_t>(p)]) != ProcessState::kStopped) continue;
        fail(p, waited, format("timed out waiting for rank %d, whose process is stopped,", group_.name_of(p)));
    }
    // The awaited rank may itself wait for another one: report the last rank of the chain.
    int last = waiting_for;
    std::vector<bool> seen(static_cast<size_t>(size()), false);
    while (!seen[static_cast<size_t>(last)]) {
        seen[static_cast<size_t>(last)] = true;
        int next = control(last).awaited.load(std::memory_order_relaxed);
        if (next >= 0 && next < size() && next != rank() && !has_arrived(next)) last = next;
    }
    fail(last, waited, format("timed out waiting for rank %d", group_.name_of(last)));
}

void Call::distrust(int p) {
    fail(p, 0.0,
         format("rank %d announced an impossible operation: its memory was damaged or tampered with",
                group_.name_of(p)));
}

void Call::fail_with(int p, double waited) {
    fail(group_.cause_of(p), waited,
         format("rank %d gave up (%s)", group_.name_of(p), text_of(control(p).why, sizeof control(p).why).c_str()));
}

void Call::fail(int peer, double waited, const std::string& what) {
    std::string text = format("rank %d: %s: %s after %.2f s", group_.name_of(rank()), name_, what.c_str(), waited);
    group_.break_for_good(group_.clock_, peer, text);
    throw CommFailure(group_.name_of(rank()), group_.name_of(peer), name_, waited, text);
}

void Call::compare() const {
    for (int p = 0; p < size(); ++p) {
        if (announced(p).kind != Kind::kRefused) continue;
        std::string reason = text_of(control(p).refusal[slot_], sizeof control(p).refusal[0]);
        throw ArgumentError(format("%s: rank %d could not take part: %s", name_, group_.name_of(p), reason.c_str()));
    }
    for (int p = 1; p < size(); ++p) {
        if (announced(p).agrees_with(announced(0))) continue;
        auto call_of = [&](int q) {
            return describe(announced(q), text_of(control(q).algorithm[slot_], sizeof control(q).algorithm[0]));
        };
        throw ArgumentError(format("the ranks disagree: rank %d called %s where rank %d called %s", group_.name_of(p),
                                   call_of(p).c_str(), group_.name_of(0), call_of(0).c_str()));
    }
}

bool Call::all_in_arenas() const {
    for (int p = 0; p < size(); ++p) {
        if (!is_in_arena(p)) return false;
    }
    return true;
}

bool Call::any_in_arena() const {
    for (int p = 0; p < size(); ++p) {
        if (is_in_arena(p)) return true;
    }
    return false;
}

bool Call::any_is_apart() const {
    for (int p = 0; p < size(); ++p) {
        if (announced(p).is_apart != 0) return true;
    }
    return false;
}

void Call::note_largest(float magnitude) {
    std::atomic<float>& noted = control(rank()).largest[slot_];  // published by this rank's next step
    // Peers have this line in their caches, and the value is nearly always 0: it is written only if it changes.
    if (noted.load(std::memory_order_relaxed) != magnitude) noted.store(magnitude, std::memory_order_relaxed);
}

Shares Call::shares(int64_t num_bytes) const { return Shares(slacks_.empty() ? group_.slacks_ : slacks_, num_bytes); }

float Call::largest() const {
    float out = 0.0f;
    for (int p = 0; p < size(); ++p) {
        out = larger(out, control(p).largest[slot_].load(std::memory_order_relaxed));
    }
    return out;
}

void Call::observe_staging(int64_t num_bytes, double seconds) {
    if (rank() == 0) group_.staging_.observe(num_bytes, seconds);
}

}  // namespace pycomm
