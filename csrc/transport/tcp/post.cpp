#include "transport/tcp/post.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "base/time.h"
#include "transport/texts.h"

namespace pycomm {
namespace {

constexpr uint32_t kPostMagic = 0x31505950;  // "PYP1"
constexpr size_t kMostText = 500;
constexpr int64_t kMostMessage = int64_t{1} << 48;
constexpr int kMostUnanswered = 64;  // signs of life for a stopped process, whose window they must not fill
constexpr double kSecondsForLastWords = 1.0;

}  // namespace

Post::Post(int rank, std::vector<Descriptor> sockets, std::vector<std::string> addresses, double dead_after,
           std::function<void()> news)
    : rank_(rank),
      size_(static_cast<int>(sockets.size())),
      addresses_(std::move(addresses)),
      dead_after_(dead_after),
      news_(std::move(news)),
      lines_(sockets.size()) {
    const double now = monotonic_seconds();
    for (int p = 0; p < size_; ++p) {
        line(p).heard = now;
        if (p == rank) continue;
        Descriptor& socket = line(p).socket = std::move(sockets[static_cast<size_t>(p)]);
        fcntl(socket.get(), F_SETFL, fcntl(socket.get(), F_GETFL) | O_NONBLOCK);
    }
    try {
        for (int p = 0; p < size_; ++p) {
            if (p != rank) watch(this, p, line(p).socket.get());
        }
    } catch (...) {
        unwatch(this);
        throw;
    }
}

Post::~Post() {
    if (!is_in_child_) close("it dropped its communicator");
}

// Requires mutex_, as all of the following.
void Post::put(Line& to, Heading heading, const void* content) {
    if (!to.socket.is_open() || to.is_over) return;
    heading.magic = kPostMagic;
    std::vector<char> part(sizeof heading + static_cast<size_t>(heading.num_bytes));
    std::memcpy(part.data(), &heading, sizeof heading);
    if (heading.num_bytes > 0)
        std::memcpy(part.data() + sizeof heading, content, static_cast<size_t>(heading.num_bytes));
    to.out.push_back(std::move(part));
    flush(to);
}

void Post::flush(Line& to) {
    while (!to.out.empty()) {
        const std::vector<char>& part = to.out.front();
        const ssize_t sent =
            ::send(to.socket.get(), part.data() + to.out_at, part.size() - to.out_at, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS) to.out.clear();  // reading tells why
            break;
        }
        to.out_at += static_cast<size_t>(sent);
        if (to.out_at < part.size()) break;
        to.out.pop_front();
        to.out_at = 0;
    }
    if (to.out.empty()) to.out_at = 0;
    const bool wants_room = !to.out.empty();
    if (wants_room != to.wants_room) watch_for_room(to.socket.get(), to.wants_room = wants_room);
}

void Post::on_ready(int index) {
    Lock lock(mutex_);
    Line& from = line(index);
    if (!from.socket.is_open()) return;
    const bool was_gone = from.gone.has_value();
    if (!from.out.empty()) flush(from);
    read(index);
    const bool is_news = from.gone.has_value() && !was_gone;
    if (is_news) give_up_hopeless();
    lock.unlock();
    changed_.notify_all();
    if (is_news) news_();
}

void Post::read(int p) {
    Line& from = line(p);
    char buffer[64 << 10];
    for (int rounds = 0; rounds < 64 && !from.is_over; ++rounds) {  // the other connections wait meanwhile
        const bool is_direct =
            from.heading_at == sizeof(Heading) && from.content.size() - from.content_at >= sizeof buffer;
        char* const to = is_direct ? from.content.data() + from.content_at : buffer;
        const size_t room = is_direct ? from.content.size() - from.content_at : sizeof buffer;
        const ssize_t came = recv(from.socket.get(), to, room, MSG_DONTWAIT);
        if (came < 0 && errno == EINTR) continue;
        if (came < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (came <= 0) {
            const bool is_end = came == 0 || errno == ECONNRESET || errno == EPIPE;
            const std::string how = is_end ? "is closed" : format("failed: error %d", errno);
            return end(p, format("rank %d died (its connection to %s %s)", p, address_of(p), how.c_str()));
        }
        from.heard = monotonic_seconds();
        from.unanswered = 0;
        if (is_direct) {
            from.content_at += static_cast<size_t>(came);
            if (from.content_at == from.content.size()) finish_part(p);
            continue;
        }
        for (size_t at = 0; at < static_cast<size_t>(came) && !from.is_over;) {
            if (from.heading_at < sizeof(Heading)) {
                const size_t part = std::min(sizeof(Heading) - from.heading_at, static_cast<size_t>(came) - at);
                std::memcpy(reinterpret_cast<char*>(&from.heading) + from.heading_at, buffer + at, part);
                from.heading_at += part;
                at += part;
                if (from.heading_at < sizeof(Heading)) break;
                const Heading& heading = from.heading;
                const bool is_text = heading.subject == Subject::kGoodbye || heading.subject == Subject::kAbort;
                const int64_t most = heading.subject == Subject::kMessage ? kMostMessage : is_text ? kMostText : 0;
                if (heading.magic != kPostMagic || heading.num_bytes < 0 || heading.num_bytes > most) {
                    return end(p, format("rank %d sent something that is not a message of this group", p));
                }
                try {
                    from.content.resize(static_cast<size_t>(heading.num_bytes));
                } catch (const std::exception&) {
                    return end(p, format("rank %d sent a message that is too large for the memory here", p));
                }
                from.content_at = 0;
            }
            const size_t part = std::min(from.content.size() - from.content_at, static_cast<size_t>(came) - at);
            if (part > 0) std::memcpy(from.content.data() + from.content_at, buffer + at, part);
            from.content_at += part;
            at += part;
            if (from.content_at == from.content.size()) finish_part(p);
        }
    }
}

void Post::finish_part(int p) {
    Line& from = line(p);
    const Heading heading = from.heading;
    std::vector<char> content = std::move(from.content);
    from.content.clear();
    from.content_at = from.heading_at = 0;
    switch (heading.subject) {
        case Subject::kLife:
            break;
        case Subject::kGoodbye:
        case Subject::kAbort: {
            const bool names_one = heading.subject == Subject::kAbort && heading.tag >= 0 && heading.tag < size_;
            const int cause = names_one && heading.tag != rank_ ? static_cast<int>(heading.tag) : p;
            if (!from.gone.has_value()) {
                from.gone = Gone{cause, true,
                                 format("rank %d gave up (%s)", p,
                                        text_of(content.empty() ? "" : content.data(), content.size()).c_str())};
            }
            break;
        }
        case Subject::kMessage:
            deliver({p, heading.tag, heading.width, std::move(content)});
            break;
        case Subject::kTaken:
            from.in_use -= heading.tag;
            in_use_ -= heading.tag;
            break;
        case Subject::kLost:
            if (heading.tag >= 0 && heading.tag < size_ && from.lost < 0) from.lost = static_cast<int>(heading.tag);
            break;
        default:
            end(p, format("rank %d sent something that is not a message of this group", p));
    }
}

void Post::end(int p, const std::string& what) {
    Line& from = line(p);
    from.is_over = true;
    from.out.clear();
    if (!from.gone.has_value()) from.gone = Gone{p, false, what};
}

namespace {

// Whether there is something to acknowledge, and the other side's host has acknowledged nothing for long.
bool is_silent(int socket, double seconds) {
    tcp_info info{};
    socklen_t length = sizeof info;
    if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
    return info.tcpi_unacked > 0 && info.tcpi_last_ack_recv > 1e3 * seconds;
}

}  // namespace

void Post::on_tick() {
    bool is_news = false;
    {
        Lock lock(mutex_);
        for (int p = 0; p < size_; ++p) {
            Line& to = line(p);
            if (!to.socket.is_open() || to.is_over) continue;
            if (is_silent(to.socket.get(), dead_after_)) {
                to.has_vanished = true;
                end(p, format("the host of rank %d, %s, has acknowledged nothing for %g s", p, address_of(p),
                              dead_after_));
                is_news = true;
            } else if (to.out.empty() && to.unanswered < kMostUnanswered) {
                ++to.unanswered;
                put(to, {.subject = Subject::kLife}, nullptr);
            }
        }
        if (is_news) give_up_hopeless();
    }
    if (!is_news) return;
    changed_.notify_all();
    news_();
}

void Post::leave(int cause, const std::string& why) {
    Lock lock(mutex_);
    if (has_left_) return;
    has_left_ = true;
    left_cause_ = cause;
    why_left_ = why;
    char text[kMostText];
    copy_text(text, sizeof text, why);
    const Subject subject = cause < 0 ? Subject::kGoodbye : Subject::kAbort;
    const auto length = static_cast<int64_t>(strnlen(text, sizeof text));
    for (Line& to : lines_) put(to, {.subject = subject, .tag = cause, .num_bytes = length}, text);
}

std::optional<Gone> Post::gone(int p) {
    Lock lock(mutex_);
    return line(p).gone;
}

bool Post::has_vanished(int p) {
    Lock lock(mutex_);
    return line(p).has_vanished;
}

Gone Post::end_of(int p) {
    const double start = monotonic_seconds();
    Lock lock(mutex_);
    Line& from = line(p);
    while (!from.gone.has_value() && monotonic_seconds() - start < kSecondsForLastWords) {
        changed_.wait_for(lock, std::chrono::milliseconds(20));
    }
    if (from.gone.has_value()) return *from.gone;
    return {p, false, format("rank %d closed its connection for data, to %s", p, address_of(p))};
}

double Post::silence(int p) {
    Lock lock(mutex_);
    return monotonic_seconds() - line(p).heard;
}

void Post::hand_over(double patience) {
    const double end = monotonic_seconds() + patience;
    auto is_done = [&] {
        Lock lock(mutex_);
        return std::all_of(lines_.begin(), lines_.end(), [](const Line& to) {
            int waiting = 0;
            if (!to.socket.is_open() || to.is_over) return true;
            return to.out.empty() && (ioctl(to.socket.get(), SIOCOUTQ, &waiting) != 0 || waiting == 0);
        });
    };
    for (double pause = 1e-4; !is_done() && monotonic_seconds() < end; pause = std::min(2 * pause, 1e-2)) {
        std::this_thread::sleep_for(std::chrono::duration<double>(pause));
    }
}

void Post::close(const std::string& why) {
    {
        Lock lock(mutex_);
        if (is_closed_) return;
        is_closed_ = true;
        why_closed_ = why;
    }
    unwatch(this);
    Lock lock(mutex_);
    const std::string text = format("rank %d: recv: the communicator was closed meanwhile (%s)", rank_, why.c_str());
    for (const ExpectedPtr& each : expected_)
        finish(*each, std::make_exception_ptr(CommFailure(rank_, -1, "recv", 0.0, text)));
    expected_.clear();
    arrived_.clear();
    for (Line& each : lines_) each.socket.close();
    drop_keepers(lock);
    changed_.notify_all();
}

void Post::close_in_child() {
    is_in_child_ = true;  // the mutex may be held, by a thread that was not forked
    for (Line& each : lines_) each.socket.close();
}

}  // namespace pycomm
