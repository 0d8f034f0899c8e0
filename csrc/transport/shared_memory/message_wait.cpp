#include "transport/shared_memory/message_wait.h"

#include <unistd.h>

#include "base/time.h"
#include "transport/process.h"
#include "transport/shared_memory/call.h"
#include "transport/texts.h"

namespace pycomm {

MessageWait::MessageWait(Messages& messages, const char* name, double timeout)
    : messages_(messages), name_(name), timeout_(timeout), next_look_(kLookSeconds) {}

MessageWait::~MessageWait() {
    if (peer_.has_value()) messages_.publish_wait(*peer_, false);
}

void MessageWait::begin(int peer) {
    if (peer_.has_value()) return;
    peer_ = peer;
    messages_.publish_wait(peer, true);
}

CommFailure MessageWait::failure(int peer, double waited, const std::string& what) const {
    return {rank(), peer, name_, waited, format("rank %d: %s: %s after %.2f s", rank(), name_, what.c_str(), waited)};
}

void MessageWait::require_usable() const {
    if (messages_.group_.closing_) throw failure(-1, 0.0, "the communicator was closed meanwhile");
    Control& mine = control(rank());
    if (mine.gave_up.load(std::memory_order_acquire) == 0) return;
    throw failure(mine.failed_peer, 0.0,
                  "this communicator is broken since an earlier failure (" + text_of(mine.why, sizeof mine.why) + ")");
}

CommFailure MessageWait::loss(const Gone& gone, double waited) const {
    int32_t nobody = 0;
    control(rank()).lost.compare_exchange_strong(nobody, gone.peer + 1, std::memory_order_acq_rel);
    return failure(gone.peer, waited, gone.what);
}

bool MessageWait::died(int p) const {
    return p != rank() && connection_closed(messages_.group_.sockets_[static_cast<size_t>(p)].get()) &&
           control(p).gave_up.load(std::memory_order_acquire) == 0;
}

// If p has ended, returns the root cause: its own end, or the end of another rank that made p end.
std::optional<MessageWait::Gone> MessageWait::gone(int p) const {
    std::optional<Gone> found = ended(p);
    if (!found.has_value()) return found;
    const int cause = messages_.group_.cause_of(p);
    if (cause != p) {
        std::optional<Gone> first = ended(cause);
        return Gone{cause, first.has_value() ? first->what : found->what};
    }
    if (died(p)) return found;
    for (int q = 0; q < size(); ++q) {  // a death explains why others close
        if (died(q)) return ended(q);
    }
    return found;
}

std::optional<MessageWait::Gone> MessageWait::ended(int p) const {
    if (p == rank()) return std::nullopt;
    const Control& theirs = control(p);
    if (theirs.gave_up.load(std::memory_order_acquire) != 0) {
        return Gone{p, format("rank %d gave up (%s)", p, text_of(theirs.why, sizeof theirs.why).c_str())};
    }
    if (connection_closed(messages_.group_.sockets_[static_cast<size_t>(p)].get())) {
        return Gone{p, format("rank %d died (its connection is closed)", p)};
    }
    // A process that is dumping core keeps its connections open until the dump is written.
    if (state_of(messages_.group_.pids_[static_cast<size_t>(p)]) == ProcessState::kDumpingCore) {
        return Gone{p, format("rank %d is dumping core", p)};
    }
    if (messages_.incoming_->is_distrusted(p)) {
        return Gone{p, format("rank %d announced an impossible message: its memory was damaged or tampered with", p)};
    }
    return std::nullopt;
}

// src -1: any rank; returns the first one if all others are gone.
std::optional<MessageWait::Gone> MessageWait::all_gone(int src) const {
    if (src >= 0) return gone(src);
    std::optional<Gone> first;
    for (int p = 0; p < size(); ++p) {
        if (p == rank()) continue;
        std::optional<Gone> found = gone(p);
        if (!found.has_value()) return found;
        if (!first.has_value()) first = found;
    }
    return first;
}

void MessageWait::require_present(int p) {
    std::atomic<double>& next = messages_.next_look_[static_cast<size_t>(p)];
    const bool says_so = p != rank() && control(p).gave_up.load(std::memory_order_acquire) != 0;
    const double now = monotonic_seconds();
    if (!says_so && now < next.load(std::memory_order_relaxed)) return;
    next.store(now + kLookSeconds, std::memory_order_relaxed);
    if (auto found = gone(p)) throw loss(*found, 0.0);
}

void MessageWait::let_signals_through() const {
    messages_.group_.check_signals_();
    require_own_process(rank(), name_, messages_.group_.pid_);  // a handler may have forked
}

std::string MessageWait::stopped(int p) const {
    const bool is_stopped = state_of(messages_.group_.pids_[static_cast<size_t>(p)]) == ProcessState::kStopped;
    return is_stopped ? ", whose process is stopped," : "";
}

void MessageWait::give_up_if_hopeless(const ReceiptPtr& receipt, double waited) {
    std::optional<Gone> found = all_gone(messages_.incoming_->awaited(*receipt));
    // Whatever they sent before they ended is visible by now.
    if (!found.has_value() || messages_.incoming_->progress(receipt.get())) return;
    messages_.incoming_->give_up(receipt, std::make_exception_ptr(loss(*found, waited)));
}

void MessageWait::for_message(const ReceiptPtr& receipt) {
    const Bell bell = messages_.bell_of(rank());
    auto done = [&] { return messages_.incoming_->progress(receipt.get()); };
    wait_until(
        {bell.rings, bell.sleepers}, done,
        [&](double waited) {
            messages_.office(rank()).looks.fetch_add(1, std::memory_order_seq_cst);
            const int src = messages_.incoming_->awaited(*receipt);
            begin(src < 0 && size() == 2 ? 1 - rank() : src);
            if (waited >= next_look_ || control(src < 0 ? rank() : src).gave_up.load(std::memory_order_acquire) != 0) {
                next_look_ = waited + kLookSeconds;
                give_up_if_hopeless(receipt, waited);
                if (receipt->is_finished()) return;
            }
            require_usable();
            if (waited > timeout_) {
                std::string what = src < 0 ? "timed out waiting for a message from any rank"
                                           : format("timed out waiting for rank %d%s", src, stopped(src).c_str());
                throw failure(src, waited, what + format(" with tag %lld", static_cast<long long>(receipt->tag)));
            }
            let_signals_through();
        },
        messages_.group_.for_messages_);
}

void MessageWait::for_room(int dst, int64_t cost) {
    const Bell bell = messages_.bell_of(rank());
    // Others may wait for room until this rank takes their messages.
    auto done = [&] {
        messages_.incoming_->progress(nullptr);
        return messages_.outgoing_->reserve(cost);
    };
    wait_until(
        {bell.rings, bell.sleepers}, done,
        [&](double waited) {
            messages_.office(rank()).looks.fetch_add(1, std::memory_order_seq_cst);
            begin(dst);
            require_usable();
            const bool timed_out = waited > timeout_;
            if (waited >= next_look_ || timed_out) {
                next_look_ = waited + kLookSeconds;
                if (auto found = gone(dst)) throw loss(*found, waited);
                if (would_wait_for_ever(dst)) {
                    throw failure(
                        dst, waited,
                        what_is_buffered() + format("; rank %d does not take them: it waits for this rank", dst));
                }
            }
            if (timed_out) {
                throw failure(dst, waited,
                              what_is_buffered() +
                                  format("; timed out waiting for rank %d%s to take them", dst, stopped(dst).c_str()));
            }
            let_signals_through();
        },
        messages_.group_.for_messages_);
}

std::string MessageWait::what_is_buffered() const {
    return format("no room: at most %lld bytes may be buffered (PYCOMM_BUFFER_BYTES), in use are: %s",
                  static_cast<long long>(messages_.outgoing_->limit()), messages_.outgoing_->describe().c_str());
}

// Whether the chain of waits from dst leads back to this rank and has stood still since the last call, although all of
// its ranks that wait for messages have looked for some meanwhile. Each rank of the chain, this one included, has a
// single thread in an operation: another thread could still move something, even if it has no core at the moment.
bool MessageWait::would_wait_for_ever(int dst) {
    if (messages_.office(rank()).awaited.load(std::memory_order_relaxed) < 0) return false;
    constexpr uint32_t kEnoughLooks = 2;  // so that one of them began after the last call
    std::vector<uint32_t> seen, looks;
    int p = dst;
    for (int i = 0; i <= size() && p >= 0 && p < size(); ++i) {
        seen.push_back(static_cast<uint32_t>(p));
        seen.push_back(messages_.office(p).moves.load(std::memory_order_acquire));  // before all that is read below
        if (p == rank()) {
            if (seen != seen_ || looks.size() != looks_.size()) {
                seen_ = std::move(seen);
                looks_ = std::move(looks);
                return false;
            }
            for (size_t k = 0; k < looks.size(); ++k) {
                if (looks[k] - looks_[k] < kEnoughLooks) return false;
            }
            return true;
        }
        const int by_message = messages_.office(p).awaited.load(std::memory_order_relaxed);
        if (by_message >= 0) {
            // Read between two reads of its moves, so that a move before the last of these looks is not missed.
            looks.push_back(messages_.office(p).looks.load(std::memory_order_seq_cst));
            seen.push_back(messages_.office(p).moves.load(std::memory_order_relaxed));
        }
        p = by_message >= 0 ? by_message : control(p).awaited.load(std::memory_order_relaxed);
    }
    seen_.clear();
    return false;
}

}  // namespace pycomm
