// Messages between two ranks of a SharedMemoryGroup: buffered, with a tag, from one rank or any. They need neither the
// lock nor the steps of the collectives: a thread may be in a collective while others send and receive.
//
// The sender copies the message into memory of its own arena and appends it to a list, one for each receiver: a link
// from the last message's envelope to the new one's. So it need not wait for anybody, and ranks may send and receive in
// any order. The receiver follows the links, and copies. What is large is copied by both at once: the sender says how
// far it has come. Two bits of the envelope tell the sender that it may free the message, which it does when it sends
// the next one.
//
//   sender's file    first -> envelope 0 -> envelope 1 -> envelope 2        one list for each receiver
//                                |              |             |
//                             payload        payload       payload, half of it there
//
// A receipt is a receive that has been posted. Of the messages that suit it, from its source or any, with its tag, it
// gets the one that was sent first, unless a receipt posted earlier has it. Every thread that waits moves all receipts.
//
// What a message needs is counted from send() until it is taken. Where that would be more than a limit, send() waits;
// and gives up at once where it would wait for ever, since the receiver itself waits for this rank.
//
// Failures concern the one send or receive: the group is not broken by them. What was sent completely before its sender
// died or closed is received all the same.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport/shared_memory/group.h"
#include "transport/shared_memory/incoming.h"
#include "transport/shared_memory/outgoing.h"

namespace pycomm {

class Messages {
   public:
    // For the constructor of `group`, all of whose other members exist.
    explicit Messages(SharedMemoryGroup& group);

    // Returns once x has been copied. Throws ArgumentError if x alone exceeds the limit. `width`: bytes of an element.
    void send(const Buffer& x, int64_t width, int dst, int64_t tag, double timeout);
    // src -1: any rank.
    ReceiptPtr post_receive(const Buffer& x, int64_t width, int src, int64_t tag, std::shared_ptr<void> keeper);
    // Returns the rank whose message x now has. Throws ArgumentError if that message has another size; it is taken
    // nevertheless. After a timeout or a signal the receipt remains posted.
    int wait(const ReceiptPtr& receipt, double timeout);
    // Whether wait() would return, or throw, at once. Throws nothing of that itself.
    bool is_completed(const ReceiptPtr& receipt);
    // Nothing is written to x any more. False if it is finished.
    bool cancel(const ReceiptPtr& receipt);

    int64_t buffer_limit() const { return outgoing_->limit(); }
    void set_buffer_limit(int64_t num_bytes);
    int64_t buffered_bytes() { return outgoing_->buffered(); }

    // For close(). True if it must wait for an operation of this very thread, at whose end it will be called again.
    bool postpone_close(const std::string& why);
    // Whether this thread is in an operation.
    bool is_inside() const;
    // Ends all operations, and waits until their threads have left.
    void end(const std::string& why);

   private:
    class Inside;
    friend class MessageWait;

    PostOffice& office(int p) const;
    Bell bell_of(int p) const { return {office(p).rings, office(p).listening}; }
    void tell(int p);                          // that something is new
    void publish_wait(int peer, bool begins);  // of a thread
    void publish_awaited();
    [[noreturn]] void fail_at_once(const char* name, const std::string& what) const;

    SharedMemoryGroup& group_;
    std::unique_ptr<Outgoing> outgoing_;
    std::unique_ptr<Incoming> incoming_;
    std::vector<std::atomic<double>> next_look_;  // when to see whether that peer is there

    mutable std::mutex threads_mutex_;
    std::condition_variable left_;
    std::vector<std::thread::id> inside_;
    std::vector<int> waiting_for_;  // of each thread that waits
    int awaited_ = -1;              // as the post office has it
    bool ended_ = false;
    std::string why_ended_, close_later_;
};

}  // namespace pycomm
