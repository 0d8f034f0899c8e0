#include "transport/shared_memory/outgoing.h"

#include <algorithm>
#include <new>

#include "base/error.h"
#include "base/time.h"

namespace pycomm {
namespace {

constexpr int64_t kSlabBytes = 64 << 10;
constexpr int64_t kEnvelopeBytes = sizeof(Envelope);

}  // namespace

Outgoing::Outgoing(std::shared_ptr<Arena> arena, FirstEnvelope* firsts, int size)
    : arena_(std::move(arena)), firsts_(firsts), queues_(static_cast<size_t>(size)) {}

int Outgoing::cell_of(int64_t num_bytes) {
    int cell = 0;
    if (num_bytes > kSmallBytes) return cell;
    while (kSmallestCell << cell < num_bytes + kEnvelopeBytes) ++cell;
    return cell;
}

// Cells are larger, by half on average. That is not counted: the limit that users set is about the bytes they send.
int64_t Outgoing::cost_of(int64_t num_bytes) { return num_bytes + kSmallestCell; }

bool Outgoing::reserve(int64_t cost) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (cost > limit_ - buffered_) {
        sweep_all_now_and_then();
        if (cost > limit_ - buffered_) return false;
    }
    buffered_ += cost;
    return true;
}

char* Outgoing::allocate_cell(int cell) {
    std::vector<char*>& free = cells_[cell];
    if (free.empty()) {
        const int64_t size = kSmallestCell << cell;
        char* slab = arena_->allocate(kSlabBytes);  // kept until the end
        for (int64_t at = kSlabBytes - size; at >= 0; at -= size) free.push_back(slab + at);
    }
    char* found = free.back();
    free.pop_back();
    return found;
}

Letter Outgoing::open(int64_t num_bytes, int64_t width, int64_t tag) {
    const bool small = num_bytes <= kSmallBytes;
    const int cell = cell_of(num_bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    char* memory = nullptr;
    char* block = nullptr;
    try {
        memory = allocate_cell(cell);
        if (!small) block = arena_->allocate(num_bytes);
    } catch (...) {
        if (memory != nullptr) cells_[cell].push_back(memory);
        buffered_ -= cost_of(num_bytes);
        throw;
    }
    Envelope* envelope = new (memory) Envelope{};
    envelope->width = static_cast<int32_t>(width);
    envelope->num_bytes = num_bytes;
    char* payload = small ? memory + kEnvelopeBytes : block;
    envelope->payload = payload - arena_->data();
    envelope->tag = tag;
    return {envelope, payload, cell, block, cost_of(num_bytes)};
}

void Outgoing::post(int dst, const Letter& letter) {
    std::lock_guard<std::mutex> lock(mutex_);
    Queue& queue = queues_[static_cast<size_t>(dst)];
    letter.envelope->number = queue.count++;
    queue.under_way.push_back(letter);
    FirstEnvelope& link = queue.last == nullptr ? firsts_[dst] : queue.last->next;
    queue.last = letter.envelope;
    // Sequentially consistent, as Bell requires.
    link.store(reinterpret_cast<char*>(letter.envelope) - arena_->data(), std::memory_order_seq_cst);
    sweep_front(queue);
}

// Returns whether the letter can be dropped. Its payload is freed as soon as the message was taken: the envelope of a
// queue's last message has to stay until the next one is sent.
bool Outgoing::is_done(const Queue& queue, Letter& letter) {
    const uint32_t fate = letter.envelope->fate.load(std::memory_order_acquire);
    if ((fate & Envelope::kTaken) == 0) return false;
    buffered_ -= letter.cost;
    letter.cost = 0;
    if (letter.block != nullptr) arena_->release(letter.block);
    letter.block = nullptr;
    if ((fate & Envelope::kPassed) == 0 || letter.envelope == queue.last) return false;
    cells_[letter.cell].push_back(reinterpret_cast<char*>(letter.envelope));
    return true;
}

void Outgoing::sweep(Queue& queue) {
    auto done = [&](Letter& letter) { return is_done(queue, letter); };
    queue.under_way.erase(std::remove_if(queue.under_way.begin(), queue.under_way.end(), done), queue.under_way.end());
    queue.sweep_at = 2 * queue.under_way.size() + 64;
}

// Sweeps the front, which is cheap at any length, and from time to time all: messages may be taken in any order.
void Outgoing::sweep_front(Queue& queue) {
    while (!queue.under_way.empty() && is_done(queue, queue.under_way.front())) queue.under_way.pop_front();
    if (queue.under_way.size() >= queue.sweep_at) sweep(queue);
}

// A thread that waits for room calls this again and again, and millions of messages may be under way.
void Outgoing::sweep_all_now_and_then() {
    constexpr double kPause = 10.0;  // times the duration of a sweep
    const double start = monotonic_seconds();
    if (start < next_sweep_) {
        for (Queue& queue : queues_) sweep_front(queue);
        return;
    }
    for (Queue& queue : queues_) sweep(queue);
    const double end = monotonic_seconds();
    next_sweep_ = end + kPause * (end - start);
}

int64_t Outgoing::limit() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return limit_;
}

void Outgoing::set_limit(int64_t num_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = num_bytes;
}

int64_t Outgoing::buffered() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Queue& queue : queues_) sweep(queue);
    return buffered_;
}

std::string Outgoing::describe() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::string text;
    for (size_t p = 0; p < queues_.size(); ++p) {
        sweep(queues_[p]);
        int64_t bytes = 0;
        for (const Letter& letter : queues_[p].under_way) bytes += letter.cost;
        if (bytes == 0) continue;
        text += format("%s%lld for rank %zu", text.empty() ? "" : ", ", static_cast<long long>(bytes), p);
    }
    return text.empty() ? "none" : text;
}

void Outgoing::end() {
    std::lock_guard<std::mutex> lock(mutex_);
    arena_.reset();
}

}  // namespace pycomm
