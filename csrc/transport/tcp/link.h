// The data connection between two ranks: bytes queued to be sent, and memory that bytes are received into. Nothing here
// blocks. What is sent stays the caller's until it has left; what comes beyond the wanted bytes waits in a buffer, so
// that a small frame and its payload take one system call.
//
// Where the network limits each flow, a connection may have several sockets: each carries every n-th stripe of the
// bytes. Both sides move stripe by stripe; the kernels' buffers keep all flows busy.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "base/descriptor.h"

namespace pycomm {

class Link {
   public:
    static constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

    explicit Link(std::vector<Descriptor> sockets);

    // Sockets of the next bytes in each direction.
    int in_socket() const { return socket_at(num_come_).get(); }
    int out_socket() const { return socket_at(num_left_).get(); }

    // Queues bytes to be sent after the earlier ones.
    void send(const void* data, int64_t num_bytes);
    // Lets at most `num_bytes` more leave.
    void allow(int64_t num_bytes) { allowed_ = num_bytes; }
    int64_t unsent() const { return unsent_; }
    // Drops what was queued: all of it, or what is not allowed to leave.
    void forget_unsent();
    void forget_beyond_allowance();
    // Bytes that have left since the beginning.
    int64_t num_left() const { return num_left_; }
    // Whether something could leave, and the kernel has taken nothing at the last try.
    bool is_sending() const { return unsent_ > 0 && allowed_ > 0; }

    // Where the next bytes belong. Only once the earlier ones have come.
    void receive(void* to, int64_t num_bytes);
    bool is_receiving() const { return missing_ > 0; }
    int64_t missing() const { return missing_; }

    // Sends and receives what can be at once; returns whether anything moved.
    bool move();
    // Whether nothing more comes.
    bool has_ended() const { return has_ended_; }
    // Whether something that is wanted can never come, or leave: the other side has closed the connection or ended.
    bool is_lost() const { return (missing_ > 0 && has_ended_) || (missing_ == 0 && unsent_ > 0 && cannot_send_); }

    // Ends the connection in both directions, so that the other side notices.
    void shut_down();
    // Whether the other side's kernel has everything.
    bool is_delivered() const;
    // The bytes of a segment that was sent again and again, and never acknowledged; 0: there is none.
    unsigned lost_segment() const;
    void close();

   private:
    struct Piece {
        const char* data;
        int64_t num_bytes;
    };

    bool push();
    bool pull();
    const Descriptor& socket_at(int64_t position) const {
        return sockets_[sockets_.size() == 1 ? 0 : static_cast<size_t>(position / kStripeBytes) % sockets_.size()];
    }
    // Bytes from a position to the end of its stripe.
    int64_t left_of_stripe(int64_t position) const {
        return sockets_.size() == 1 ? kUnlimited : kStripeBytes - position % kStripeBytes;
    }

    static constexpr int64_t kStripeBytes = 64 << 10;

    std::vector<Descriptor> sockets_;
    std::vector<Piece> pieces_;  // from first_ on
    size_t first_ = 0;
    int64_t unsent_ = 0, allowed_ = kUnlimited, num_left_ = 0, num_come_ = 0;
    char* target_ = nullptr;
    int64_t missing_ = 0;
    std::unique_ptr<char[]> ahead_;  // bytes that came beyond the wanted ones: [ahead_begin_, ahead_end_)
    int64_t ahead_begin_ = 0, ahead_end_ = 0;
    bool has_ended_ = false, cannot_send_ = false;
};

}  // namespace pycomm
