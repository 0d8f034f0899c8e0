#include "transport/tcp/call.h"

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "base/time.h"
#include "transport/process.h"
#include "transport/texts.h"

namespace pycomm {
namespace {

constexpr uint32_t kFrameMagic = 0x01435950;  // "PYC\1"
constexpr uint16_t kFrameVersion = 1;
constexpr int64_t kCreditBytes = 64 << 10;
constexpr uint32_t kMostReason = 512;
constexpr int kLooks = 3;                  // before the time is read
constexpr double kSpinSeconds = 50e-6;     // about what it costs to sleep and be woken
constexpr double kBusySeconds = 5e-6;      // without giving way
constexpr double kWorthSpinning = 100e-6;  // usual waits that are shorter
constexpr double kLeastUsual = 1e-6, kLearnStep = 1.1;
constexpr int kSliceMilliseconds = 100;
constexpr double kSilentProcess = 3.0;  // seconds without a sign of life

// FNV-1a: finds a stream that has slipped. TCP has its own sums against errors of the link.
uint32_t check_of(const Frame& frame) {
    uint32_t sum = 2166136261U;
    const auto* bytes = reinterpret_cast<const unsigned char*>(&frame);
    for (size_t i = 0; i < offsetof(Frame, check); ++i) sum = (sum ^ bytes[i]) * 16777619U;
    return sum;
}

Operation operation_of(const Frame& frame) {
    Operation out{};
    std::memcpy(static_cast<void*>(&out), frame.operation, kAgreedBytes);
    return out;
}

}  // namespace

TcpCall::TcpCall(TcpGroup& group, const char* name, double timeout, std::vector<int> members)
    : group_(group), name_(name), timeout_(timeout), members_(std::move(members)) {
    group.lock_for_operation(lock_, name);
    try {
        if (!group.broken_.empty()) {
            throw CommFailure(
                group.rank_, group.failed_peer_, name, 0.0,
                format("%s: this communicator is %s (%s)", name,
                       group.closed_ ? "closed" : "broken since an earlier failure", group.broken_.c_str()));
        }
        const int count = num_members();
        index_ = static_cast<int>(std::find(members_.begin(), members_.end(), group.rank_) - members_.begin());
        for (int distance = 1; distance < count; ++distance) {
            peers_.push_back(members_[static_cast<size_t>((index_ + distance) % count)]);
        }
        if (!group.refusal_.empty()) {  // that some rank has not taken yet
            finish();
            group.refusal_.clear();
        }
        ++group.num_calls_;
    } catch (...) {
        leave();
        throw;
    }
}

TcpCall::~TcpCall() { leave(); }

void TcpCall::leave() {
    if (getpid() == group_.pid_ && group_.broken_.empty() && group_.refusal_.empty()) {
        for (int p : peers_) {  // an exception in the middle, as for lack of memory
            if (link(p).unsent() == 0 && !link(p).is_receiving()) continue;
            group_.break_for_good(group_.rank_, format("rank %d: %s: it failed in the middle", group_.rank_, name_));
            break;
        }
    }
    group_.busy_.store(std::thread::id(), std::memory_order_relaxed);
    const std::string why = group_.closed_within();
    if (!why.empty()) group_.close_with_lock(why);
}

char* TcpCall::scratch(int64_t num_bytes) {
    if (static_cast<int64_t>(group_.scratch_.size()) < num_bytes)
        group_.scratch_.resize(static_cast<size_t>(num_bytes));
    return group_.scratch_.data();
}

void TcpCall::send_frames(const Operation& mine, const void* extra, uint32_t extra_bytes) {
    frames_.resize(static_cast<size_t>(group_.size_));
    for (int p : peers_) {
        int64_t attached = 0;
        for (const First& each : first_) attached += each.peer == p ? each.num_bytes : 0;
        attached = std::min(attached, kCreditBytes);
        Frame& frame = frames_[static_cast<size_t>(p)];
        frame = {.magic = kFrameMagic,
                 .version = kFrameVersion,
                 .reserved = 0,
                 .meeting = group_.meeting_,
                 .number = group_.num_calls_,
                 .operation = {},
                 .extra = extra_bytes,
                 .attached = static_cast<uint32_t>(attached),
                 .zero = 0,
                 .check = 0};
        std::memcpy(frame.operation, &mine, kAgreedBytes);
        frame.check = check_of(frame);
        Link& to = link(p);
        to.send(&frame, sizeof frame);
        to.send(extra, extra_bytes);
        for (const First& each : first_) {
            if (each.peer == p) to.send(each.data, each.num_bytes);
        }
        to.allow(static_cast<int64_t>(sizeof frame) + extra_bytes + attached);
    }
}

void TcpCall::begin(const Operation& mine, const void* extra, uint32_t extra_bytes,
                    const std::function<void()>& verify) {
    if (peers_.empty()) return;
    send_frames(mine, extra, extra_bytes);
    read_frames();
    Frame& own = readings_[static_cast<size_t>(rank())].frame;
    std::memcpy(own.operation, &mine, kAgreedBytes);
    if (extra_bytes > 0) {
        const auto* bytes = static_cast<const char*>(extra);
        extras_[static_cast<size_t>(rank())].assign(bytes, bytes + extra_bytes);
    }
    try {
        compare();
        verify();
    } catch (const ArgumentError&) {  // all members throw it, and go on
        skip_attached();
        throw;
    }
    for (int p : peers_) link(p).allow(Link::kUnlimited);
}

void TcpCall::skip_attached() {
    int64_t most = 0;
    for (int p : peers_) most = std::max<int64_t>(most, readings_[static_cast<size_t>(p)].frame.attached);
    char* const to = scratch(most);
    for (int p : peers_) {
        link(p).receive(to, readings_[static_cast<size_t>(p)].frame.attached);
        link(p).forget_beyond_allowance();
    }
    finish();
    for (int p : peers_) link(p).allow(Link::kUnlimited);
}

void TcpCall::refuse(const std::string& reason) {
    if (peers_.empty()) return;
    char text[kMostReason];
    copy_text(text, sizeof text, reason);
    const auto length = static_cast<uint32_t>(strnlen(text, sizeof text));
    send_frames({.kind = Kind::kRefused}, text, length);  // the same for all
    group_.refusal_.assign(reinterpret_cast<const char*>(&frames_[static_cast<size_t>(peers_[0])]), sizeof(Frame));
    group_.refusal_.append(text, length);
    for (int p : peers_) {
        link(p).forget_unsent();
        link(p).allow(Link::kUnlimited);
        link(p).send(group_.refusal_.data(), static_cast<int64_t>(group_.refusal_.size()));
        group_.to_skip_[static_cast<size_t>(p)].push_back(group_.num_calls_);
    }
    move_at_once();
}

void TcpCall::read_frames() {
    readings_.resize(static_cast<size_t>(group_.size_));
    extras_.resize(static_cast<size_t>(group_.size_));
    for (int p : peers_) link(p).receive(&readings_[static_cast<size_t>(p)].frame, sizeof(Frame));
    size_t num_read = 0;
    while (num_read < peers_.size()) {
        move();
        num_read = 0;
        for (int p : peers_) {
            if (!link(p).is_receiving()) advance(p);
            num_read += readings_[static_cast<size_t>(p)].stage == Reading::Stage::kDone ? 1 : 0;
        }
    }
}

void TcpCall::advance(int p) {
    using Stage = Reading::Stage;
    Reading& reading = readings_[static_cast<size_t>(p)];
    std::vector<uint64_t>& to_skip = group_.to_skip_[static_cast<size_t>(p)];
    const Frame& frame = reading.frame;
    if (reading.stage == Stage::kSkipped) {
        to_skip.erase(to_skip.begin());
        reading.stage = Stage::kFrame;
        return link(p).receive(&reading.frame, sizeof(Frame));
    }
    if (reading.stage == Stage::kFrame) {
        if (frame.magic != kFrameMagic || frame.check != check_of(frame) || frame.meeting != group_.meeting_) {
            distrust(p, "something that is not an operation of this group");
        }
        if (frame.version != kFrameVersion || frame.number != (to_skip.empty() ? group_.num_calls_ : to_skip[0])) {
            distrust(p, "an operation out of its order");
        }
        const auto most_extra = std::max<size_t>(kMostReason, 2 * sizeof(int64_t) * members_.size());
        if (!is_possible(operation_of(frame), group_.size_) || frame.extra > most_extra ||
            frame.attached > kCreditBytes) {
            distrust(p, "an impossible operation");
        }
        if (!to_skip.empty()) {
            reading.stage = Stage::kSkipped;
            const int64_t num_bytes = int64_t{frame.extra} + frame.attached;
            link(p).receive(scratch(static_cast<int64_t>(most_extra) + kCreditBytes), num_bytes);
            if (num_bytes == 0) advance(p);
            return;
        }
        extras_[static_cast<size_t>(p)].resize(frame.extra);
        reading.stage = Stage::kExtra;
        link(p).receive(extras_[static_cast<size_t>(p)].data(), frame.extra);
        if (frame.extra > 0) return;
    }
    reading.stage = Stage::kDone;
}

void TcpCall::compare() {
    auto of = [&](int p) { return operation_of(readings_[static_cast<size_t>(p)].frame); };
    auto text = [&](int p) {
        const std::vector<char>& extra = extra_of(p);
        return extra.empty() ? std::string() : text_of(extra.data(), extra.size());
    };
    for (int p : members_) {
        if (of(p).kind != Kind::kRefused) continue;
        throw ArgumentError(format("%s: rank %d could not take part: %s", name_, p, text(p).c_str()));
    }
    const int first = members_[0];
    for (int p : members_) {
        if (of(p).agrees_with(of(first))) continue;
        auto call_of = [&](int q) { return describe(of(q), of(q).kind == Kind::kProgram ? text(q) : std::string()); };
        throw ArgumentError(format("the ranks disagree: rank %d called %s where rank %d called %s", p,
                                   call_of(p).c_str(), first, call_of(first).c_str()));
    }
}

void TcpCall::receive_all() {
    auto is_receiving = [&](int p) { return link(p).is_receiving(); };
    while (std::any_of(peers_.begin(), peers_.end(), is_receiving)) move();
}

void TcpCall::finish() {
    auto is_busy = [&](int p) { return link(p).is_receiving() || link(p).unsent() > 0; };
    while (std::any_of(peers_.begin(), peers_.end(), is_busy)) move();
}

void TcpCall::move() {
    if (!move_at_once()) wait();
}

bool TcpCall::move_at_once() {
    bool moved = false;
    for (int p : peers_) moved = link(p).move() || moved;
    return moved;
}

void TcpCall::wait() {
    for (int i = 0; i < kLooks; ++i) {
        if (move_at_once()) return;
    }
    before_long_wait();
    const double start = monotonic_seconds();
    double now = start;
    bool moved = false;
    if (group_.usual_wait_ < kWorthSpinning) {
        for (; !moved && now - start < kSpinSeconds; now = monotonic_seconds()) {
            if (now - start > kBusySeconds) sched_yield();  // the awaited rank may have been on this core
            moved = move_at_once();
        }
    }
    std::vector<pollfd> wanted;
    while (!moved) {
        check(now - start);
        wanted.assign(1, {group_.waker_.get(), POLLIN, 0});
        for (int p : peers_) {
            const Link& each = link(p);
            const bool comes = each.is_receiving() && !each.has_ended();
            if (comes) wanted.push_back({each.in_socket(), POLLIN, 0});
            if (each.is_sending()) wanted.push_back({each.out_socket(), POLLOUT, 0});
        }
        const double left = std::max(0.0, timeout_ - (now - start));
        const int slice = left * 1e3 < kSliceMilliseconds ? static_cast<int>(left * 1e3) + 1 : kSliceMilliseconds;
        poll(wanted.data(), wanted.size(), slice);
        if ((wanted[0].revents & POLLIN) != 0) {
            uint64_t count;
            [[maybe_unused]] const ssize_t got = read(group_.waker_.get(), &count, sizeof count);
        }
        moved = move_at_once();
        now = monotonic_seconds();
    }
    const double before = std::max(group_.usual_wait_, kLeastUsual);
    group_.usual_wait_ = now - start > before ? before * kLearnStep : before / kLearnStep;
}

void TcpCall::check(double waited) {
    if (group_.closing_) fail(-1, waited, "the communicator was closed meanwhile");
    if (group_.gives_up_) {
        const auto [cause, why] = group_.failure_elsewhere();
        group_.break_for_good(cause, why);
        throw CommFailure(rank(), cause == rank() ? -1 : cause, name_, waited, why);
    }
    for (int p : peers_) {
        const Link& each = link(p);
        if (!each.is_receiving() && each.unsent() == 0) continue;
        if (!each.is_lost() && !group_.post_->has_vanished(p)) continue;
        const Gone gone = group_.post_->end_of(p);
        fail(gone.cause, waited, gone.what);
    }
    if (waited > timeout_) time_out(waited);
    try {
        group_.check_signals_();
        require_own_process(rank(), name_, group_.pid_);  // a handler may have forked
    } catch (...) {
        if (getpid() != group_.pid_) throw;
        group_.break_for_good(rank(), format("rank %d: interrupted in %s", rank(), name_));
        throw;
    }
}

// A rank that this one waits for: of several, one that shows no sign of life.
int TcpCall::awaited() const {
    int first = -1;
    for (int p : peers_) {
        if (!link(p).is_receiving() && link(p).unsent() == 0) continue;
        if (group_.post_->silence(p) > kSilentProcess) return p;
        if (first < 0) first = p;
    }
    return first;
}

void TcpCall::time_out(double waited) {
    int p = awaited();
    const bool is_stopped = p >= 0 && group_.post_->silence(p) > kSilentProcess;
    unsigned bytes = 0;
    if (!is_stopped) {
        // Of any peer: whoever is awaited may be waiting for bytes that this rank has sent, and that never arrive.
        for (const int each : peers_) {
            const unsigned lost = bytes == 0 ? link(each).lost_segment() : 0;
            if (lost > 0) std::tie(p, bytes) = std::pair(each, lost);
        }
    }
    std::string whom = p < 0 ? "the others" : group_.name_of(p);
    if (is_stopped) {
        whom += ", whose process is stopped,";
    } else if (bytes > 0) {
        whom += format(
            ", whose host acknowledges small packets, but none of %u bytes (is the MTU of the path smaller? "
            "See PYCOMM_TCP_MSS),",
            bytes);
    }
    fail(p, waited, "timed out waiting for " + whom);
}

void TcpCall::distrust(int p, const char* what) { fail(p, 0.0, format("rank %d sent %s", p, what)); }

void TcpCall::fail(int cause, double waited, const std::string& what) {
    const std::string text = format("rank %d: %s: %s after %.2f s", rank(), name_, what.c_str(), waited);
    group_.break_for_good(cause < 0 ? rank() : cause, text);
    throw CommFailure(rank(), cause, name_, waited, text);
}

}  // namespace pycomm
