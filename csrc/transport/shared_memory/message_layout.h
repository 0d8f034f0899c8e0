// Layout of the shared memory for messages. See messages.h for how it is used.
#pragma once

#include <atomic>
#include <cstdint>

namespace pycomm {

// In the sender's file, one per message. The receiver copies and checks an envelope before it acts on it.
struct alignas(64) Envelope {
    std::atomic<int64_t> next;   // offset of the next one for the same rank, 0: not sent yet
    std::atomic<int64_t> ready;  // bytes of the payload written so far
    std::atomic<uint32_t> fate;  // kTaken, kPassed, set by the receiver; with both it may be freed
    int32_t width;               // bytes of an element, for errors
    uint64_t number;             // of the message, among those for the same rank
    int64_t num_bytes;
    int64_t payload;  // its offset
    int64_t tag;

    static constexpr uint32_t kTaken = 1;   // the payload was copied
    static constexpr uint32_t kPassed = 2;  // `next` was followed
};
static_assert(sizeof(Envelope) == 64);

// In every rank's file, before the offsets of its first envelope for each rank.
struct alignas(64) PostOffice {
    // Wakes this rank when a message was posted for it, or one of its own was taken.
    std::atomic<uint32_t> rings;
    std::atomic<uint32_t> listening;
    // The rank that this one's only thread in an operation waits for; -1: no wait, or several threads.
    std::atomic<int32_t> awaited;
    // Counts messages sent and received, to detect a standstill.
    std::atomic<uint32_t> moves;
    // Counts the fruitless looks for messages of waiting threads: it stands still while a rank has no core to run on.
    std::atomic<uint32_t> looks;
};
using FirstEnvelope = std::atomic<int64_t>;
static_assert(FirstEnvelope::is_always_lock_free);

inline constexpr int64_t kEnvelopeAlign = alignof(Envelope);

// Bytes of the part that a group of `size` ranks needs of every file.
inline int64_t post_office_bytes(int size) {
    constexpr int64_t kUnit = 4096;
    const int64_t bytes = static_cast<int64_t>(sizeof(PostOffice)) + size * static_cast<int64_t>(sizeof(FirstEnvelope));
    return (bytes + kUnit - 1) / kUnit * kUnit;
}

}  // namespace pycomm
