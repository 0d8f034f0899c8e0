// Messages for this rank: finding them, and giving them to the receives that were posted for them.
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

// What this rank took from an envelope, checked.
struct Arrival {
    Envelope* envelope = nullptr;
    const char* payload = nullptr;
    int source = -1;
    int32_t width = 1;
    uint64_t number = 0;  // among those of the source
    uint64_t order = 0;   // in which it was found, among those of all sources
    int64_t num_bytes = 0, tag = 0;
};

// A receive that was posted. What is not const belongs to Incoming.
class Receipt {
   public:
    // `keeper` keeps x's memory; it is dropped when nothing is written there any more.
    Receipt(const Buffer& array, int64_t element_bytes, int source, int64_t its_tag, std::shared_ptr<void> kept)
        : x(array), width(element_bytes), src(source), tag(its_tag), keeper(std::move(kept)) {}

    bool is_finished() const { return finished.load(std::memory_order_acquire); }

    const Buffer x;
    const int64_t width;  // bytes of an element, for errors
    const int src;        // -1: any
    const int64_t tag;

    std::shared_ptr<void> keeper;
    Arrival message;  // that it gets; none yet while it has no envelope
    int64_t copied = 0;
    bool busy = false;  // a thread is copying
    std::atomic<bool> finished{false};
    // Once it is finished: null if the message was received.
    std::exception_ptr failure;
};
using ReceiptPtr = std::shared_ptr<Receipt>;

// All methods may be called by several threads.
class Incoming {
   public:
    // bases[p]: where the file of rank p lies; first[p]: where the offset of its first envelope for this rank is.
    // news(source): called after a message of `source` was taken, and after a receipt was finished.
    Incoming(std::vector<char*> bases, std::vector<FirstEnvelope*> firsts, int64_t header_bytes, int64_t file_bytes,
             std::function<void(int source)> news);

    void post(ReceiptPtr receipt);
    // Moves all messages as far as they go, those of `wanted` first; null: none in particular. Returns whether `wanted`
    // is finished.
    bool progress(Receipt* wanted);
    // The source that it waits for, -1: any.
    int awaited(const Receipt& receipt);
    // Whether `source` announced what cannot be. Nothing more is read from it.
    bool is_distrusted(int source);
    // Ends a receipt that is not finished; a message that it has not copied completely is left to others. False if it
    // was finished before.
    bool give_up(const ReceiptPtr& receipt, std::exception_ptr failure);
    // The same for all.
    void give_up_all(std::exception_ptr failure);

   private:
    struct Source {
        char* base;
        FirstEnvelope* first;
        Envelope* last;  // whose `next` tells of the next one
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
    std::list<ReceiptPtr> posted_;  // in that order
    uint64_t found_ = 0;
};

}  // namespace pycomm
