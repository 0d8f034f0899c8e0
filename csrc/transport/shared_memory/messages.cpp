#include "transport/shared_memory/messages.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "transport/process.h"
#include "transport/shared_memory/call.h"
#include "transport/shared_memory/message_wait.h"

namespace pycomm {
namespace {

constexpr int64_t kMessagePieceBytes = 64 << 10;  // small enough to pass through a cache that sender and receiver share

class Posted final : public PostedReceive {
   public:
    Posted(Messages& messages, ReceiptPtr receipt) : messages_(messages), receipt_(std::move(receipt)) {}
    int wait(double timeout) override { return messages_.wait(receipt_, timeout); }
    bool is_completed() override { return messages_.is_completed(receipt_); }
    bool cancel() override { return messages_.cancel(receipt_); }

   private:
    Messages& messages_;
    ReceiptPtr receipt_;
};

}  // namespace

// Marks a thread as inside an operation. close() waits for its end; signal handlers must not begin another one within
// it.
class Messages::Inside {
   public:
    Inside(Messages& messages, const char* name) : messages_(messages) {
        require_own_process(messages.group_.rank_, name, messages.group_.pid_);
        const auto self = std::this_thread::get_id();
        if (messages.group_.busy_ == self || messages.is_inside()) {
            messages.fail_at_once(name, "called by a signal handler while this thread is in another operation");
        }
        std::lock_guard<std::mutex> lock(messages.threads_mutex_);
        if (messages.ended_) {
            messages.fail_at_once(name, "this communicator is closed (" + messages.why_ended_ + ")");
        }
        messages.inside_.push_back(self);
        messages.publish_awaited();
    }

    ~Inside() {
        if (getpid() != messages_.group_.pid_) return;  // a signal handler has forked: this is the child
        std::string close_now;
        {
            std::lock_guard<std::mutex> lock(messages_.threads_mutex_);
            std::erase(messages_.inside_, std::this_thread::get_id());
            messages_.publish_awaited();
            if (messages_.inside_.empty()) messages_.left_.notify_all();
            if (messages_.close_later_.empty()) return;
            close_now = messages_.close_later_;
        }
        messages_.group_.close(close_now);
    }

    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    Messages& messages_;
};

Messages::Messages(SharedMemoryGroup& group) : group_(group), next_look_(static_cast<size_t>(group.size_)) {
    const int size = group.size_, rank = group.rank_;
    auto firsts = [&](int p) { return reinterpret_cast<FirstEnvelope*>(&office(p) + 1); };
    std::vector<FirstEnvelope*> for_this_rank;
    for (int p = 0; p < size; ++p) for_this_rank.push_back(firsts(p) + rank);
    outgoing_ = std::make_unique<Outgoing>(group.arena_, firsts(rank), size);
    incoming_ = std::make_unique<Incoming>(group.bases_, std::move(for_this_rank), header_bytes(size),
                                           group.file_bytes_, [this](int source) {
                                               tell(source);
                                               tell(group_.rank_);
                                           });
    office(rank).awaited = -1;
}

PostOffice& Messages::office(int p) const {
    return *reinterpret_cast<PostOffice*>(group_.base(p) + post_office_at(group_.size_));
}

void Messages::tell(int p) {
    office(group_.rank_).moves.fetch_add(1, std::memory_order_relaxed);
    bell_of(p).ring();
}

void Messages::fail_at_once(const char* name, const std::string& what) const {
    throw CommFailure(group_.rank_, -1, name, 0.0, format("rank %d: %s: %s", group_.rank_, name, what.c_str()));
}

void Messages::send(const Buffer& x, int64_t width, int dst, int64_t tag, double timeout) {
    Inside inside(*this, "send");
    MessageWait wait(*this, "send", timeout);
    wait.require_usable();
    wait.require_present(dst);
    const int64_t bytes = x.num_bytes(), cost = Outgoing::cost_of(bytes);
    if (cost > outgoing_->limit()) {
        throw ArgumentError(
            format("x has %lld bytes, wanted a message that fits into the %lld bytes that may be "
                   "buffered (PYCOMM_BUFFER_BYTES)",
                   static_cast<long long>(bytes), static_cast<long long>(outgoing_->limit())));
    }
    if (!outgoing_->reserve(cost)) wait.for_room(dst, cost);
    const Letter letter = outgoing_->open(bytes, width, tag);
    std::atomic<int64_t>& ready = letter.envelope->ready;
    if (bytes <= Outgoing::kSmallBytes) {
        if (bytes > 0) std::memcpy(letter.payload, x.data, static_cast<size_t>(bytes));
        ready.store(bytes, std::memory_order_relaxed);
        outgoing_->post(dst, letter);
        return tell(dst);
    }
    outgoing_->post(dst, letter);
    tell(dst);
    for (int64_t at = 0; at < bytes; at += kMessagePieceBytes) {
        const int64_t piece = std::min(kMessagePieceBytes, bytes - at);
        std::memcpy(letter.payload + at, x.bytes() + at, static_cast<size_t>(piece));
        ready.store(at + piece, std::memory_order_seq_cst);
        tell(dst);
    }
}

ReceiptPtr Messages::post_receive(const Buffer& x, int64_t width, int src, int64_t tag, std::shared_ptr<void> keeper) {
    Inside inside(*this, "recv");
    MessageWait(*this, "recv", 0.0).require_usable();
    auto receipt = std::make_shared<Receipt>(x, width, src, tag, std::move(keeper));
    incoming_->post(receipt);
    return receipt;
}

int Messages::wait(const ReceiptPtr& receipt, double timeout) {
    if (!receipt->is_finished()) {
        Inside inside(*this, "recv");
        MessageWait(*this, "recv", timeout).for_message(receipt);
    }
    if (receipt->failure != nullptr) std::rethrow_exception(receipt->failure);
    return receipt->message.source;
}

bool Messages::is_completed(const ReceiptPtr& receipt) {
    if (receipt->is_finished()) return true;
    Inside inside(*this, "recv");
    if (incoming_->progress(receipt.get())) return true;
    MessageWait(*this, "recv", 0.0).give_up_if_hopeless(receipt, 0.0);
    return receipt->is_finished();
}

bool Messages::cancel(const ReceiptPtr& receipt) {
    if (receipt->is_finished()) return false;
    Inside inside(*this, "recv");
    std::string text = format("rank %d: recv: this receive was cancelled", group_.rank_);
    bool withdrawn = incoming_->give_up(
        receipt, std::make_exception_ptr(CommFailure(group_.rank_, -1, "recv", 0.0, std::move(text))));
    if (withdrawn) tell(group_.rank_);  // wakes the thread that waits for it
    return withdrawn;
}

void Messages::set_buffer_limit(int64_t num_bytes) {
    if (num_bytes < 0) throw ArgumentError("buffer_limit is negative, wanted a number of bytes");
    outgoing_->set_limit(num_bytes);
}

bool Messages::is_inside() const {
    std::lock_guard<std::mutex> lock(threads_mutex_);
    return std::find(inside_.begin(), inside_.end(), std::this_thread::get_id()) != inside_.end();
}

bool Messages::postpone_close(const std::string& why) {
    if (!is_inside()) return false;
    std::lock_guard<std::mutex> lock(threads_mutex_);
    if (close_later_.empty()) close_later_ = why;
    return true;
}

void Messages::end(const std::string& why) {
    {
        std::unique_lock<std::mutex> lock(threads_mutex_);
        if (ended_) return;
        ended_ = true;
        why_ended_ = why;
        close_later_.clear();
        left_.wait(lock, [&] { return inside_.empty(); });
    }
    std::string text = format("rank %d: recv: the communicator was closed meanwhile (%s)", group_.rank_, why.c_str());
    incoming_->give_up_all(std::make_exception_ptr(CommFailure(group_.rank_, -1, "recv", 0.0, std::move(text))));
    outgoing_->end();
}

void Messages::publish_wait(int peer, bool begins) {
    std::lock_guard<std::mutex> lock(threads_mutex_);
    if (begins) {
        waiting_for_.push_back(peer);
    } else {
        waiting_for_.erase(std::find(waiting_for_.begin(), waiting_for_.end(), peer));
    }
    publish_awaited();
}

// Requires threads_mutex_. Publishes no wait while a second thread is in an operation: the peer may wait for that one.
void Messages::publish_awaited() {
    const int awaited = waiting_for_.size() == 1 && inside_.size() == 1 ? waiting_for_[0] : -1;
    if (awaited == awaited_) return;
    awaited_ = awaited;
    office(group_.rank_).awaited.store(awaited, std::memory_order_relaxed);
}

void SharedMemoryGroup::send(const Buffer& x, int64_t width, int dst, int64_t tag, double timeout) {
    messages_->send(x, width, dst, tag, timeout);
}

std::unique_ptr<PostedReceive> SharedMemoryGroup::post_receive(const Buffer& x, int64_t width, int src, int64_t tag,
                                                               std::shared_ptr<void> keeper) {
    return std::make_unique<Posted>(*messages_, messages_->post_receive(x, width, src, tag, std::move(keeper)));
}

int64_t SharedMemoryGroup::buffer_limit() { return messages_->buffer_limit(); }

void SharedMemoryGroup::set_buffer_limit(int64_t num_bytes) { messages_->set_buffer_limit(num_bytes); }

int64_t SharedMemoryGroup::buffered_bytes() { return messages_->buffered_bytes(); }

}  // namespace pycomm
