// Messages for this rank: finds them and matches them with posted receives.
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "base/buffer.h"
#include "transport/shared_memory/message_layout.h"

namespace pycomm {

// A checked copy of an envelope.
struct Arrival {
    Envelope* envelope = nullptr;
    const char* payload = nullptr;
    int source = -1;
    int32_t width = 1;
    uint64_t number = 0;  // among the messages of the source
    uint64_t order = 0;   // in which it was found, over all sources
    int64_t num_bytes = 0, tag = 0;
};

// A posted receive. Members that are not const belong to Incoming.
class Receipt {
   public:
    // `keeper` keeps x's memory alive; it is dropped once nothing more is written there.
    Receipt(const Buffer& array, int64_t element_bytes, int source, int64_t its_tag, std::shared_ptr<void> kept)
        : x(array), width(element_bytes), src(source), tag(its_tag), keeper(std::move(kept)) {}

    bool is_finished() const { return finished.load(std::memory_order_acquire); }

    const Buffer x;
    const int64_t width;  // bytes of an element, for errors
    const int src;        // -1: any
    const int64_t tag;

    std::shared_ptr<void> keeper;
    Arrival message;  // the matched one; without an envelope: none yet
    int64_t copied = 0;
    bool busy = false;  // a thread is copying
    std::atomic<bool> finished{false};
    // Valid once it is finished; null if the message was received.
    std::exception_ptr failure;
};
using ReceiptPtr = std::shared_ptr<Receipt>;

// All methods are thread-safe.
class Incoming {
   public:
    // bases[p]: start of rank p's file; firsts[p]: holds the offset of its first envelope for this rank. news(source):
    // called after a message from `source` was taken and its receipt was finished.
    Incoming(std::vector<char*> bases, std::vector<FirstEnvelope*> firsts, int64_t header_bytes, int64_t file_bytes,
             std::function<void(int source)> news);

    void post(ReceiptPtr receipt);
    // Copies all messages as far as they have arrived, first the one for `wanted` unless it is null. Returns whether
    // `wanted` is finished.
    bool progress(Receipt* wanted);
    // The source that `receipt` waits for, -1: any.
    int awaited(const Receipt& receipt);
    // Whether `source` announced an impossible message. Nothing more is read from it then.
    bool is_distrusted(int source);
    // Finishes a receipt with `failure`; a message that it has not copied completely goes to another receipt. Returns
    // false if it was finished before.
    bool give_up(const ReceiptPtr& receipt, std::exception_ptr failure);
    // The same for all receipts.
    void give_up_all(std::exception_ptr failure);

   private:
    struct Source {
        char* base;
        FirstEnvelope* first;
        Envelope* last;  // its `next` leads to the next one
        uint64_t count;
        std::deque<Arrival> unmatched;
        bool distrusted;
    };
    using Lock = std::unique_lock<std::mutex>;
    using Keepers = std::vector<std::shared_ptr<void>>;  // to be dropped without the lock

    bool read(Source& source, int64_t offset, Arrival& arrival) const;
    void look_for_arrivals(size_t p);
    ReceiptPtr next_to_copy(Receipt* wanted);
    int64_t ready_bytes(const Receipt& receipt) const;
    bool can_copy(const Receipt& receipt) const;
    void copy_some(Lock& lock, Receipt& receipt, Keepers& dropped);
    void finish(Receipt& receipt, std::exception_ptr failure, Keepers& dropped);

    std::mutex mutex_;
    std::vector<Source> sources_;
    int64_t header_bytes_, file_bytes_;
    std::function<void(int)> news_;
    std::list<ReceiptPtr> posted_;  // in the order of posting
    uint64_t found_ = 0;
};

}  // namespace pycomm
