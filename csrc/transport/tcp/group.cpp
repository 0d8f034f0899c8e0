#include "transport/tcp/group.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <numeric>

#include "base/error.h"
#include "base/time.h"
#include "transport/process.h"
#include "transport/tcp/call.h"

namespace pycomm {
namespace {

constexpr unsigned kLockPollMicroseconds = 1000;
constexpr double kSecondsToDeliver = 1.0;
constexpr double kSecondsForCause = 0.2;

std::vector<std::string> names_at(const std::vector<std::string>& addresses) {
    std::vector<std::string> names;
    for (size_t p = 0; p < addresses.size(); ++p) names.push_back(format("rank %zu at %s", p, addresses[p].c_str()));
    return names;
}

}  // namespace

TcpGroup::TcpGroup(int rank, uint64_t meeting, std::vector<std::vector<Descriptor>> data,
                   std::vector<Descriptor> control, const std::vector<std::string>& addresses, double dead_after,
                   std::function<void()> check_signals)
    : rank_(rank),
      size_(static_cast<int>(data.size())),
      meeting_(meeting),
      names_(names_at(addresses)),
      check_signals_(std::move(check_signals)),
      waker_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      to_skip_(data.size()),
      pid_(getpid()) {
    if (!waker_.is_open()) throw DeviceError(format("no descriptor for a communicator: error %d of eventfd", errno));
    for (std::vector<Descriptor>& each : data) links_.emplace_back(std::move(each));
    post_ = std::make_unique<Post>(rank, std::move(control), addresses, dead_after, [this] { wake(); });
    watch_forks(this);
}

TcpGroup::~TcpGroup() {
    close("it dropped its communicator");
    unwatch_forks(this);
}

void TcpGroup::wake() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(waker_.get(), &one, sizeof one);
}

void TcpGroup::after_fork_in_child() {
    for (Link& each : links_) each.close();
    post_->close_in_child();
    waker_.close();
}

void TcpGroup::break_for_good(int cause, const std::string& why) {
    if (!broken_.empty()) return;  // the first reason is the one to report
    broken_ = why;
    failed_peer_ = cause == rank_ ? -1 : cause;
    post_->leave(cause, why);  // before the others see an end
    for (Link& each : links_) each.shut_down();
}

void TcpGroup::close(const std::string& why) {
    if (getpid() != pid_) return;  // a forked child must not close its parent's group
    closing_ = true;
    wake();
    if (busy_ == std::this_thread::get_id() || is_in_message()) {
        std::lock_guard<std::mutex> lock(threads_mutex_);
        if (closed_within_.empty()) closed_within_ = why;
        return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    close_with_lock(why);
}

void TcpGroup::close_with_lock(const std::string& why) {
    if (closed_) return;
    closed_ = true;
    const bool was_whole = broken_.empty();
    post_->leave(-1, format("rank %d: %s", rank_, why.c_str()));
    if (was_whole) {
        broken_ = format("rank %d: %s", rank_, why.c_str());
        const double end = monotonic_seconds() + kSecondsToDeliver;
        auto is_delivered = [](const Link& each) { return each.is_delivered(); };
        while (!std::all_of(links_.begin(), links_.end(), is_delivered) && monotonic_seconds() < end) usleep(100);
    }
    post_->hand_over(kSecondsToDeliver);
    for (Link& each : links_) each.close();
    post_->close(why);
}

void TcpGroup::lock_for_operation(std::unique_lock<std::mutex>& lock, const char* name) {
    require_own_process(rank_, name, pid_);
    if (busy_ == std::this_thread::get_id() || is_in_message()) {
        throw CommFailure(rank_, -1, name, 0.0,
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

std::vector<int64_t> TcpGroup::bytes_sent() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int64_t> out;
    for (const Link& each : links_) out.push_back(each.num_left());
    return out;
}

void TcpGroup::give_up(int cause, const std::string& why) {
    require_own_process(rank_, "use", pid_);
    {
        std::lock_guard<std::mutex> lock(threads_mutex_);
        if (!gives_up_) {
            cause_elsewhere_ = cause < 0 ? rank_ : cause;
            why_elsewhere_ = why;
        }
        gives_up_ = true;
    }
    wake();
    std::lock_guard<std::mutex> lock(mutex_);
    break_for_good(cause < 0 ? rank_ : cause, why);
}

int TcpGroup::cause_of_end(int p) {
    const double end = monotonic_seconds() + kSecondsForCause;
    std::optional<Gone> gone = post_->gone(p);
    for (; !gone.has_value() && monotonic_seconds() < end; gone = post_->gone(p)) usleep(1000);
    return gone.has_value() && gone->cause != rank_ ? gone->cause : p;
}

std::pair<int, std::string> TcpGroup::failure_elsewhere() const {
    std::lock_guard<std::mutex> lock(threads_mutex_);
    return {cause_elsewhere_, why_elsewhere_};
}

void TcpGroup::refuse(const std::string& reason, double timeout) {
    std::vector<int> all(static_cast<size_t>(size_));
    std::iota(all.begin(), all.end(), 0);
    TcpCall(*this, "refuse", timeout, std::move(all)).refuse(reason);
}

std::string TcpGroup::closed_within() const {
    std::lock_guard<std::mutex> lock(threads_mutex_);
    return closed_within_;
}

bool TcpGroup::is_in_message() const {
    std::lock_guard<std::mutex> lock(threads_mutex_);
    return std::find(in_messages_.begin(), in_messages_.end(), std::this_thread::get_id()) != in_messages_.end();
}

// Marks a thread as inside a send or receive: signal handlers must not begin another operation within it.
class TcpGroup::InMessage {
   public:
    InMessage(TcpGroup& group, const char* name) : group_(group) {
        require_own_process(group.rank_, name, group.pid_);
        if (group.busy_ == std::this_thread::get_id() || group.is_in_message()) {
            throw CommFailure(
                group.rank_, -1, name, 0.0,
                format("rank %d: %s: called by a signal handler while this thread is in another operation", group.rank_,
                       name));
        }
        std::lock_guard<std::mutex> lock(group.threads_mutex_);
        group.in_messages_.push_back(std::this_thread::get_id());
    }
    ~InMessage() {
        if (getpid() != group_.pid_) return;  // a signal handler has forked: this is the child
        std::string close_now;
        {
            std::lock_guard<std::mutex> lock(group_.threads_mutex_);
            std::erase(group_.in_messages_, std::this_thread::get_id());
            if (group_.busy_ != std::this_thread::get_id()) close_now = group_.closed_within_;
        }
        if (!close_now.empty()) group_.close(close_now);
    }
    InMessage(const InMessage&) = delete;
    InMessage& operator=(const InMessage&) = delete;

    std::function<void()> check(const char* name) const {
        return [this, name] {
            if (group_.closing_) {
                throw CommFailure(group_.rank_, -1, name, 0.0,
                                  format("rank %d: %s: the communicator was closed meanwhile", group_.rank_, name));
            }
            group_.check_signals_();
            require_own_process(group_.rank_, name, group_.pid_);  // a handler may have forked
        };
    }

   private:
    TcpGroup& group_;
};

class TcpGroup::Posted final : public PostedReceive {
   public:
    Posted(TcpGroup& group, ExpectedPtr expected) : group_(group), expected_(std::move(expected)) {}

    int wait(double timeout) override {
        const InMessage inside(group_, "recv");
        return group_.post_->wait(expected_, timeout, inside.check("recv"));
    }
    bool is_completed() override {
        const InMessage inside(group_, "recv");
        return group_.post_->is_completed(expected_);
    }
    bool cancel() override {
        const InMessage inside(group_, "recv");
        return group_.post_->cancel(expected_);
    }

   private:
    TcpGroup& group_;
    ExpectedPtr expected_;
};

void TcpGroup::send(const Buffer& x, int64_t width, int dst, int64_t tag, double timeout) {
    const InMessage inside(*this, "send");
    post_->send(x, width, dst, tag, timeout, inside.check("send"));
}

std::unique_ptr<PostedReceive> TcpGroup::post_receive(const Buffer& x, int64_t width, int src, int64_t tag,
                                                      std::shared_ptr<void> keeper) {
    const InMessage inside(*this, "recv");
    return std::make_unique<Posted>(*this, post_->post_receive(x, width, src, tag, std::move(keeper)));
}

}  // namespace pycomm
