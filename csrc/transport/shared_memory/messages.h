// Messages between two ranks of a SharedMemoryGroup: buffered, with a tag, from one rank or any. They need neither the
// lock nor the steps of the collectives: a thread may be in a collective while others send and receive.
//
// The sender copies the message into its own arena and appends it to a list, one per receiver: it links the last
// message's envelope to the new one. So it waits for nobody, and ranks may send and receive in any order. The receiver
// follows the links and copies. Both copy a large message at the same time: the sender publishes how far it has come.
// Two bits of the envelope say that the message may be freed, which the sender does when it sends the next one.
//
//   sender's file    first -> envelope 0 -> envelope 1 -> envelope 2        one list for each receiver
//                                |              |             |
//                             payload        payload       payload, half of it there
//
// A receipt is a posted receive. It accepts messages with its tag, from its source or from any, and gets the one sent
// first, unless a receipt posted earlier has taken it. Every waiting thread makes progress on all receipts.
//
// The bytes of a message count as buffered from send() until the message is taken. If they would exceed a limit, send()
// waits for room. It fails at once if it would wait forever, because the receiver itself waits for this rank.
//
// A failure concerns one send or receive and does not break the group. A message that was sent completely can be
// received even if its sender has died or closed since.
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
    // For the constructor of `group`, after all other members exist.
    explicit Messages(SharedMemoryGroup& group);

    // Returns once x has been copied. Throws ArgumentError if x alone exceeds the limit. `width`: bytes of an element.
    void send(const Buffer& x, int64_t width, int dst, int64_t tag, double timeout);
    // src -1: any rank.
    ReceiptPtr post_receive(const Buffer& x, int64_t width, int src, int64_t tag, std::shared_ptr<void> keeper);
    // Returns the sender of the message that x now holds. Throws ArgumentError if the message has another size; it is
    // consumed nevertheless. After a timeout or a signal the receipt remains posted.
    int wait(const ReceiptPtr& receipt, double timeout);
    // Whether wait() would return, or throw, at once. Does not throw that error itself.
    bool is_completed(const ReceiptPtr& receipt);
    // Withdraws the receipt: nothing more is written to x. Returns false if it was finished before.
    bool cancel(const ReceiptPtr& receipt);

    int64_t buffer_limit() const { return outgoing_->limit(); }
    void set_buffer_limit(int64_t num_bytes);
    int64_t buffered_bytes() { return outgoing_->buffered(); }

    // For close(). Returns true if this thread is in an operation, which then calls close() again at its end.
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
    void tell(int p);                          // signals p that something has changed
    void publish_wait(int peer, bool begins);  // the wait of a thread
    void publish_awaited();
    [[noreturn]] void fail_at_once(const char* name, const std::string& what) const;

    SharedMemoryGroup& group_;
    std::unique_ptr<Outgoing> outgoing_;
    std::unique_ptr<Incoming> incoming_;
    std::vector<std::atomic<double>> next_look_;  // when to check the next time that a peer is alive

    mutable std::mutex threads_mutex_;
    std::condition_variable left_;
    std::vector<std::thread::id> inside_;
    std::vector<int> waiting_for_;  // the peer of each waiting thread
    int awaited_ = -1;              // as published in the post office
    bool ended_ = false;
    std::string why_ended_, close_later_;
};

}  // namespace pycomm
