#include "transport/shared_memory/incoming.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/time.h"

namespace pycomm {
namespace {

constexpr int kMostArrivals = 256;            // of one source at a time
constexpr int64_t kMostCopied = 1 << 20;      // at a time
constexpr double kNextPieceSeconds = 200e-6;  // waking up costs about 70 us

// The compiler must not read again what a peer may have changed meanwhile.
template <class T>
T once(const T& shared) {
    return *const_cast<const volatile T*>(&shared);
}

bool accepts(const Receipt& receipt, const Arrival& arrival) {
    return receipt.message.envelope == nullptr && receipt.tag == arrival.tag &&
           (receipt.src < 0 || receipt.src == arrival.source);
}

std::exception_ptr wrong_size(const Receipt& receipt) {
    const Arrival& message = receipt.message;
    auto elements = [](int64_t num_bytes, int64_t width) {
        return format("%lld bytes (%lld elements of %lld)", static_cast<long long>(num_bytes),
                      static_cast<long long>(num_bytes / width), static_cast<long long>(width));
    };
    return std::make_exception_ptr(
        ArgumentError(format("x has %s, but the message from rank %d with tag %lld has %s",
                             elements(receipt.x.num_bytes(), receipt.width).c_str(), message.source,
                             static_cast<long long>(message.tag), elements(message.num_bytes, message.width).c_str())));
}

}  // namespace

Incoming::Incoming(std::vector<char*> bases, std::vector<FirstEnvelope*> firsts, int64_t header_bytes,
                   int64_t file_bytes, std::function<void(int)> news)
    : header_bytes_(header_bytes), file_bytes_(file_bytes), news_(std::move(news)) {
    for (size_t p = 0; p < bases.size(); ++p) sources_.push_back({bases[p], firsts[p], nullptr, 0, {}, false});
}

// Copies the envelope at `offset`, once. Returns whether it is possible.
bool Incoming::read(Source& source, int64_t offset, Arrival& arrival) const {
    constexpr int64_t kBytes = sizeof(Envelope);
    if (offset < header_bytes_ || offset > file_bytes_ - kBytes || offset % kEnvelopeAlign != 0) return false;
    auto* envelope = reinterpret_cast<Envelope*>(source.base + offset);
    arrival.envelope = envelope;
    arrival.width = std::max(1, once(envelope->width));
    arrival.number = once(envelope->number);
    arrival.num_bytes = once(envelope->num_bytes);
    arrival.tag = once(envelope->tag);
    const int64_t payload = once(envelope->payload);
    if (arrival.number != source.count) return false;  // this also rules out cycles in the list
    if (payload < header_bytes_ || payload > file_bytes_) return false;
    if (arrival.num_bytes < 0 || arrival.num_bytes > file_bytes_ - payload) return false;
    arrival.payload = source.base + payload;
    return true;
}

// Finds new messages of rank p, and gives each to the first receipt that accepts it.
void Incoming::look_for_arrivals(size_t p) {
    Source& source = sources_[p];
    for (int i = 0; i < kMostArrivals && !source.distrusted; ++i) {
        const int64_t offset =
            (source.last == nullptr ? *source.first : source.last->next).load(std::memory_order_acquire);
        if (offset == 0) return;
        Arrival arrival;
        if (!read(source, offset, arrival)) {
            source.distrusted = true;
            return;
        }
        if (source.last != nullptr) source.last->fate.fetch_or(Envelope::kPassed, std::memory_order_release);
        source.last = arrival.envelope;
        ++source.count;
        arrival.source = static_cast<int>(p);
        arrival.order = found_++;
        auto taker = std::find_if(posted_.begin(), posted_.end(),
                                  [&](const ReceiptPtr& receipt) { return accepts(*receipt, arrival); });
        if (taker == posted_.end()) {
            source.unmatched.push_back(arrival);
        } else {
            (*taker)->message = arrival;
        }
    }
}

void Incoming::post(ReceiptPtr receipt) {
    Lock lock(mutex_);
    Source* from = nullptr;
    std::deque<Arrival>::iterator found;
    for (size_t p = 0; p < sources_.size(); ++p) {
        if (receipt->src >= 0 && receipt->src != static_cast<int>(p)) continue;
        std::deque<Arrival>& unmatched = sources_[p].unmatched;
        auto first = std::find_if(unmatched.begin(), unmatched.end(),
                                  [&](const Arrival& arrival) { return accepts(*receipt, arrival); });
        if (first == unmatched.end() || (from != nullptr && found->order < first->order)) continue;
        from = &sources_[p];
        found = first;
    }
    if (from != nullptr) {
        receipt->message = *found;
        from->unmatched.erase(found);
    }
    posted_.push_back(std::move(receipt));
}

// Clamped, because a peer may write anything there.
int64_t Incoming::ready_bytes(const Receipt& receipt) const {
    const int64_t ready = receipt.message.envelope->ready.load(std::memory_order_acquire);
    return std::clamp(ready, receipt.copied, receipt.message.num_bytes);
}

bool Incoming::can_copy(const Receipt& receipt) const {
    if (receipt.message.envelope == nullptr || receipt.busy) return false;
    const int64_t ready = ready_bytes(receipt);
    return ready > receipt.copied || ready == receipt.message.num_bytes;
}

ReceiptPtr Incoming::next_to_copy(Receipt* wanted) {
    ReceiptPtr found;
    for (const ReceiptPtr& receipt : posted_) {
        if (!can_copy(*receipt)) continue;
        if (receipt.get() == wanted) return receipt;
        if (found == nullptr) found = receipt;
    }
    return found;
}

void Incoming::copy_some(Lock& lock, Receipt& receipt, Keepers& dropped) {
    const Arrival& message = receipt.message;
    const bool fits = message.num_bytes == receipt.x.num_bytes();
    const int64_t from = receipt.copied;
    int64_t bytes = ready_bytes(receipt) - from;
    if (fits && bytes > 0) {
        bytes = std::min(bytes, kMostCopied);
        receipt.busy = true;
        lock.unlock();
        std::memcpy(receipt.x.bytes() + from, message.payload + from, static_cast<size_t>(bytes));
        lock.lock();
        receipt.busy = false;
    }
    receipt.copied += bytes;
    if (receipt.copied < message.num_bytes) return;
    message.envelope->fate.fetch_or(Envelope::kTaken, std::memory_order_seq_cst);
    const int source = message.source;
    finish(receipt, fits ? nullptr : wrong_size(receipt), dropped);
    news_(source);
}

void Incoming::finish(Receipt& receipt, std::exception_ptr failure, Keepers& dropped) {
    receipt.failure = std::move(failure);
    dropped.push_back(std::move(receipt.keeper));
    receipt.finished.store(true, std::memory_order_seq_cst);
    auto place = std::find_if(posted_.begin(), posted_.end(), [&](const ReceiptPtr& p) { return p.get() == &receipt; });
    if (place != posted_.end()) posted_.erase(place);
}

bool Incoming::progress(Receipt* wanted) {
    double still_since = -1.0;
    while (true) {
        if (wanted != nullptr && wanted->is_finished()) return true;
        Keepers dropped;
        Lock lock(mutex_);
        for (size_t p = 0; p < sources_.size(); ++p) look_for_arrivals(p);
        if (ReceiptPtr receipt = next_to_copy(wanted)) {
            copy_some(lock, *receipt, dropped);
            still_since = -1.0;
            lock.unlock();
            continue;
        }
        const bool being_sent = wanted != nullptr && wanted->message.envelope != nullptr && wanted->copied > 0;
        lock.unlock();
        if (!being_sent) return false;
        // The sender is just copying: the next piece comes sooner than a sleeper would wake.
        const double now = monotonic_seconds();
        if (still_since < 0) still_since = now;
        if (now - still_since > kNextPieceSeconds) return wanted->is_finished();
        sched_yield();
    }
}

int Incoming::awaited(const Receipt& receipt) {
    Lock lock(mutex_);
    return receipt.message.envelope != nullptr ? receipt.message.source : receipt.src;
}

bool Incoming::is_distrusted(int source) {
    Lock lock(mutex_);
    return sources_[static_cast<size_t>(source)].distrusted;
}

bool Incoming::give_up(const ReceiptPtr& receipt, std::exception_ptr failure) {
    Keepers dropped;
    Lock lock(mutex_);
    while (receipt->busy) {
        lock.unlock();
        sched_yield();
        lock.lock();
    }
    if (receipt->is_finished()) return false;
    finish(*receipt, std::move(failure), dropped);
    const Arrival message = receipt->message;
    if (message.envelope != nullptr) {  // goes to another receipt, now or later
        auto taker = std::find_if(posted_.begin(), posted_.end(),
                                  [&](const ReceiptPtr& other) { return accepts(*other, message); });
        if (taker != posted_.end()) {
            (*taker)->message = message;
        } else {
            std::deque<Arrival>& unmatched = sources_[static_cast<size_t>(message.source)].unmatched;
            auto later = std::find_if(unmatched.begin(), unmatched.end(),
                                      [&](const Arrival& other) { return other.number > message.number; });
            unmatched.insert(later, message);
        }
    }
    lock.unlock();
    return true;
}

void Incoming::give_up_all(std::exception_ptr failure) {
    while (true) {
        ReceiptPtr first;
        {
            Lock lock(mutex_);
            if (posted_.empty()) return;
            first = posted_.front();
        }
        give_up(first, failure);
    }
}

}  // namespace pycomm
