// Messages of a group between hosts: the part of Post that matches them with receives.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/time.h"
#include "transport/tcp/post.h"

namespace pycomm {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(100);  // between two looks at signals
constexpr double kSilentSeconds = 3.0;                   // without a sign of life: the process does not run

}  // namespace

void Post::fail(int peer, const char* name, double waited, const std::string& what) const {
    throw CommFailure(rank_, peer, name, waited,
                      format("rank %d: %s: %s after %.2f s", rank_, name, what.c_str(), waited));
}

void Post::require_open(const char* name) const {
    if (has_left_ && !is_closed_) {
        throw CommFailure(rank_, left_cause_ == rank_ ? -1 : left_cause_, name, 0.0,
                          format("rank %d: %s: this communicator is broken since an earlier failure (%s)", rank_, name,
                                 why_left_.c_str()));
    }
    if (!is_closed_) return;
    throw CommFailure(rank_, -1, name, 0.0,
                      format("rank %d: %s: this communicator is closed (%s)", rank_, name, why_closed_.c_str()));
}

void Post::drop_keepers(Lock& lock) {
    std::vector<std::shared_ptr<void>> dropped = std::move(keepers_);
    keepers_.clear();
    lock.unlock();
    dropped.clear();  // takes the interpreter's lock
    lock.lock();
}

void Post::send(const Buffer& x, int64_t width, int dst, int64_t tag, double timeout,
                const std::function<void()>& check) {
    const double start = monotonic_seconds();
    Lock lock(mutex_);
    drop_keepers(lock);
    const int64_t bytes = x.num_bytes(), cost = bytes + static_cast<int64_t>(sizeof(Heading));
    if (cost > limit()) {
        throw ArgumentError(
            format("x has %lld bytes, wanted a message that fits into the %lld bytes that may be "
                   "buffered (PYCOMM_BUFFER_BYTES)",
                   static_cast<long long>(bytes), static_cast<long long>(limit())));
    }
    Line& to = line(dst);
    while (true) {
        require_open("send");
        const double waited = monotonic_seconds() - start;
        if (const std::optional<Gone> found = first_cause_of(dst); found.has_value()) {
            note_lost(found->cause);
            fail(found->cause, "send", waited, found->what);
        }
        if (in_use_ + cost <= limit()) break;
        if (waited > timeout) {
            std::string users;
            for (int p = 0; p < size_; ++p) {
                if (line(p).in_use == 0) continue;
                users +=
                    format("%s%lld for rank %d", users.empty() ? "" : ", ", static_cast<long long>(line(p).in_use), p);
            }
            fail(dst, "send", waited,
                 format("no room: at most %lld bytes may be buffered (PYCOMM_BUFFER_BYTES), in use are: %s; timed out "
                        "waiting for rank %d to take them",
                        static_cast<long long>(limit()), users.c_str(), dst));
        }
        changed_.wait_for(lock, kSlice);
        lock.unlock();
        check();
        lock.lock();
    }
    to.in_use += cost;
    in_use_ += cost;
    put(to, {.subject = Subject::kMessage, .tag = tag, .width = width, .num_bytes = bytes}, x.data);
}

ExpectedPtr Post::post_receive(const Buffer& x, int64_t width, int src, int64_t tag, std::shared_ptr<void> keeper) {
    Lock lock(mutex_);
    drop_keepers(lock);
    require_open("recv");
    auto expected = std::make_shared<Expected>(Expected{x, width, src, tag, std::move(keeper)});
    for (auto arrival = arrived_.begin(); arrival != arrived_.end(); ++arrival) {
        if (arrival->tag != tag || (src >= 0 && arrival->source != src)) continue;
        take(*expected, *arrival);
        arrived_.erase(arrival);
        return expected;
    }
    expected_.push_back(expected);
    return expected;
}

void Post::deliver(Arrival arrival) {
    for (auto each = expected_.begin(); each != expected_.end(); ++each) {
        Expected& expected = **each;
        if (expected.tag != arrival.tag || (expected.src >= 0 && expected.src != arrival.source)) continue;
        take(expected, arrival);
        expected_.erase(each);
        return;
    }
    arrived_.push_back(std::move(arrival));
}

void Post::take(Expected& expected, const Arrival& arrival) {
    const auto bytes = static_cast<int64_t>(arrival.content.size());
    const int64_t wanted = expected.x.num_bytes();
    expected.source = arrival.source;
    std::exception_ptr failure;
    if (bytes == wanted) {
        if (bytes > 0) std::memcpy(expected.x.data, arrival.content.data(), arrival.content.size());
    } else {
        auto of = [](int64_t num_bytes, int64_t width) {
            const int64_t each = std::max<int64_t>(1, width);
            return format("%lld bytes (%lld elements of %lld)", static_cast<long long>(num_bytes),
                          static_cast<long long>(num_bytes / each), static_cast<long long>(each));
        };
        failure = std::make_exception_ptr(ArgumentError(
            format("x has %s, but the message from rank %d with tag %lld has %s", of(wanted, expected.width).c_str(),
                   arrival.source, static_cast<long long>(arrival.tag), of(bytes, arrival.width).c_str())));
    }
    finish(expected, std::move(failure));
    put(line(arrival.source), {.subject = Subject::kTaken, .tag = bytes + static_cast<int64_t>(sizeof(Heading))},
        nullptr);
}

void Post::finish(Expected& expected, std::exception_ptr failure) {
    expected.failure = std::move(failure);
    expected.is_finished = true;
    keepers_.push_back(std::move(expected.keeper));
}

// If p has ended, the first cause that is known: its own end, or the end of another rank that made p end.
std::optional<Gone> Post::first_cause_of(int p) {
    const std::optional<Gone>& found = line(p).gone;
    if (!found.has_value()) return found;
    std::vector<bool> seen(static_cast<size_t>(size_), false);
    int at = p, first = p;
    for (bool is_first = true;; is_first = false) {
        seen[static_cast<size_t>(at)] = true;
        const Line& its = line(at);
        const int next = its.gone.has_value() && its.gone->cause != at ? its.gone->cause : its.lost;
        if (next < 0 || next == rank_) break;
        if (is_first) first = next;
        if (seen[static_cast<size_t>(next)]) {  // they name each other
            at = first;
            break;
        }
        at = next;
    }
    auto died = [this](int q) { return line(q).gone.has_value() && !line(q).gone->has_said_so; };
    for (int q = 0; at == p && !died(p) && q < size_; ++q) {  // a death explains why others close
        if (died(q)) return line(q).gone;
    }
    return Gone{at, found->has_said_so, line(at).gone.has_value() ? line(at).gone->what : found->what};
}

std::optional<Gone> Post::all_gone(int src) {
    if (src >= 0) return first_cause_of(src);
    std::optional<Gone> first;
    for (int p = 0; p < size_; ++p) {
        if (p == rank_) continue;
        if (!line(p).gone.has_value()) return std::nullopt;
        if (!first.has_value()) first = first_cause_of(p);
    }
    return first;
}

// Tells all ranks whose end has ended a message of this one, so that they blame that rank if this one ends, too.
void Post::note_lost(int p) {
    if (lost_ >= 0) return;
    lost_ = p;
    for (Line& to : lines_) put(to, {.subject = Subject::kLost, .tag = p}, nullptr);
}

// Ends the receives that nobody can send a message for any more.
void Post::give_up_hopeless() {
    for (auto each = expected_.begin(); each != expected_.end();) {
        const std::optional<Gone> found = all_gone((*each)->src);
        if (!found.has_value()) {
            ++each;
            continue;
        }
        note_lost(found->cause);
        const std::string text = format("rank %d: recv: %s", rank_, found->what.c_str());
        finish(**each, std::make_exception_ptr(CommFailure(rank_, found->cause, "recv", 0.0, text)));
        each = expected_.erase(each);
    }
}

int Post::wait(const ExpectedPtr& expected, double timeout, const std::function<void()>& check) {
    const double start = monotonic_seconds();
    Lock lock(mutex_);
    if (!expected->is_finished) give_up_hopeless();
    while (!expected->is_finished) {
        require_open("recv");
        const double waited = monotonic_seconds() - start;
        if (waited > timeout) {
            const int src = expected->src;
            std::string what = "timed out waiting for a message from any rank";
            if (src >= 0) {
                const bool is_silent = monotonic_seconds() - line(src).heard > kSilentSeconds;
                what = format("timed out waiting for rank %d%s", src, is_silent ? ", whose process is stopped," : "");
            }
            fail(src, "recv", waited, what + format(" with tag %lld", static_cast<long long>(expected->tag)));
        }
        changed_.wait_for(lock, std::min<std::chrono::duration<double>>(
                                    kSlice, std::chrono::duration<double>(timeout - waited + 1e-3)));
        lock.unlock();
        check();
        lock.lock();
    }
    drop_keepers(lock);
    if (expected->failure != nullptr) std::rethrow_exception(expected->failure);
    return expected->source;
}

bool Post::is_completed(const ExpectedPtr& expected) {
    Lock lock(mutex_);
    if (!expected->is_finished) give_up_hopeless();
    const bool is_finished = expected->is_finished;
    drop_keepers(lock);
    return is_finished;
}

bool Post::cancel(const ExpectedPtr& expected) {
    Lock lock(mutex_);
    const bool withdrawn = !expected->is_finished;
    if (withdrawn) {
        expected_.remove(expected);
        const std::string text = format("rank %d: recv: this receive was cancelled", rank_);
        finish(*expected, std::make_exception_ptr(CommFailure(rank_, -1, "recv", 0.0, text)));
        changed_.notify_all();
    }
    drop_keepers(lock);
    return withdrawn;
}

void Post::set_limit(int64_t num_bytes) {
    if (num_bytes < 0) throw ArgumentError("buffer_limit is negative, wanted a number of bytes");
    limit_.store(num_bytes, std::memory_order_relaxed);
}

int64_t Post::buffered() {
    Lock lock(mutex_);
    return in_use_;
}

}  // namespace pycomm
