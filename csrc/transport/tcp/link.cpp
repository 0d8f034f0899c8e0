#include "transport/tcp/link.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace pycomm {
namespace {

// Per system call. Larger pieces are no faster, and leave the caches before they are added.
constexpr int64_t kMostBytes = 256 << 10;
constexpr int64_t kAheadBytes = (64 << 10) + 4096;  // a small operation's frame and payload
constexpr int64_t kDirectBytes = 16 << 10;          // from here on bytes are received where they belong
constexpr size_t kMostPieces = 16;
constexpr unsigned kManyRetransmits = 3;

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR || error == ENOBUFS; }

}  // namespace

Link::Link(std::vector<Descriptor> sockets) : sockets_(std::move(sockets)) {
    if (!sockets_[0].is_open()) return;  // this rank's own
    for (const Descriptor& each : sockets_) fcntl(each.get(), F_SETFL, fcntl(each.get(), F_GETFL) | O_NONBLOCK);
    ahead_ = std::make_unique<char[]>(kAheadBytes);
}

void Link::send(const void* data, int64_t num_bytes) {
    if (num_bytes == 0) return;
    pieces_.push_back({static_cast<const char*>(data), num_bytes});
    unsent_ += num_bytes;
}

void Link::forget_unsent() {
    pieces_.clear();
    first_ = 0;
    unsent_ = 0;
}

void Link::forget_beyond_allowance() {
    while (unsent_ > allowed_) {
        Piece& last = pieces_.back();
        const int64_t part = std::min(last.num_bytes, unsent_ - allowed_);
        last.num_bytes -= part;
        unsent_ -= part;
        if (last.num_bytes == 0) pieces_.pop_back();
    }
    if (first_ == pieces_.size()) forget_unsent();
}

void Link::receive(void* to, int64_t num_bytes) {
    target_ = static_cast<char*>(to);
    missing_ = num_bytes;
}

bool Link::move() {
    const bool pushed = is_sending() && push();
    return (is_receiving() && pull()) || pushed;
}

bool Link::push() {
    if (cannot_send_) return false;
    iovec parts[kMostPieces];
    int64_t most = std::min({allowed_, kMostBytes, left_of_stripe(num_left_)});
    size_t count = 0;
    for (size_t i = first_; i < pieces_.size() && count < kMostPieces && most > 0; ++i) {
        const int64_t length = std::min(pieces_[i].num_bytes, most);
        parts[count++] = {const_cast<char*>(pieces_[i].data), static_cast<size_t>(length)};
        most -= length;
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(out_socket(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
        if (!would_block(errno)) cannot_send_ = true;  // what the other side sent before its end may still come
        return false;
    }
    unsent_ -= sent;
    num_left_ += sent;
    if (allowed_ != kUnlimited) allowed_ -= sent;
    for (int64_t left = sent; left > 0;) {
        Piece& piece = pieces_[first_];
        const int64_t part = std::min(left, piece.num_bytes);
        piece.data += part;
        piece.num_bytes -= part;
        left -= part;
        if (piece.num_bytes == 0) ++first_;
    }
    if (first_ == pieces_.size()) {
        pieces_.clear();
        first_ = 0;
    }
    return sent > 0;
}

bool Link::pull() {
    if (ahead_begin_ < ahead_end_) {
        const int64_t part = std::min(missing_, ahead_end_ - ahead_begin_);
        std::memcpy(target_, ahead_.get() + ahead_begin_, static_cast<size_t>(part));
        ahead_begin_ += part;
        target_ += part;
        missing_ -= part;
        if (missing_ == 0) return true;
    }
    if (has_ended_) return false;
    const bool is_direct = missing_ >= kDirectBytes;
    char* const to = is_direct ? target_ : ahead_.get();
    const int64_t room = std::min(is_direct ? std::min(missing_, kMostBytes) : kAheadBytes, left_of_stripe(num_come_));
    const ssize_t came = recv(in_socket(), to, static_cast<size_t>(room), MSG_DONTWAIT);
    if (came <= 0) {
        if (came == 0 || !would_block(errno)) has_ended_ = true;
        return false;
    }
    num_come_ += came;
    if (is_direct) {
        target_ += came;
        missing_ -= came;
        return true;
    }
    const int64_t part = std::min<int64_t>(missing_, came);
    std::memcpy(target_, to, static_cast<size_t>(part));
    target_ += part;
    missing_ -= part;
    ahead_begin_ = part;
    ahead_end_ = came;
    return true;
}

unsigned Link::lost_segment() const {
    for (const Descriptor& each : sockets_) {
        tcp_info info{};
        socklen_t length = sizeof info;
        if (getsockopt(each.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
        if (info.tcpi_unacked > 0 && info.tcpi_retransmits >= kManyRetransmits) return info.tcpi_snd_mss;
    }
    return 0;
}

void Link::shut_down() {
    for (const Descriptor& each : sockets_) {
        if (each.is_open()) shutdown(each.get(), SHUT_RDWR);
    }
}

void Link::close() {
    for (Descriptor& each : sockets_) each.close();
}

bool Link::is_delivered() const {
    return cannot_send_ || std::all_of(sockets_.begin(), sockets_.end(), [](const Descriptor& each) {
               int waiting = 0;
               return !each.is_open() || ioctl(each.get(), SIOCOUTQ, &waiting) != 0 || waiting == 0;
           });
}

}  // namespace pycomm
