// Messages that this rank has sent: their memory, and the lists by which their receivers find them.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/shared_memory/arena.h"
#include "transport/shared_memory/message_layout.h"

namespace pycomm {

// All methods may be called by several threads.
class Outgoing {
   public:
    // Messages of at most so many bytes lie in one cell with their envelope.
    static constexpr int64_t kSmallBytes = (64 << 10) - static_cast<int64_t>(sizeof(Envelope));

    // firsts[p]: where the offset of the first envelope for rank p goes.
    Outgoing(std::shared_ptr<Arena> arena, FirstEnvelope* firsts, int size);

    // Bytes that a message of `num_bytes` occupies until it is taken.
    static int64_t cost_of(int64_t num_bytes);

    // Takes `cost` of what may be buffered, if so much is free.
    bool reserve(int64_t cost);
    // Makes an envelope, whose cost is reserved, and room for its payload. Throws OutOfMemory.
    Envelope* open(int64_t num_bytes, int64_t width, int64_t tag);
    // Hands it to rank dst: its next message.
    void post(int dst, Envelope* envelope);

    char* payload_of(const Envelope& envelope) const { return arena_->data() + envelope.payload; }

    int64_t limit() const;
    void set_limit(int64_t num_bytes);
    int64_t buffered();
    // How many bytes are buffered for which ranks, for errors.
    std::string describe();

    // Gives the arena up, without freeing what receivers may still read.
    void end();

   private:
    static constexpr int64_t kSmallestCell = 128;
    static constexpr int kNumCells = 10;  // 128 bytes to 64 KiB

    struct Letter {
        Envelope* envelope;
        int cell;       // index of its size
        char* payload;  // a block of the arena, null where it lies in the cell, or is freed
        int64_t cost;   // 0 once it is taken
    };
    struct Queue {
        std::deque<Letter> under_way;
        Envelope* last = nullptr;
        uint64_t count = 0;
        size_t sweep_at = 64;  // of under_way
    };

    static int cell_of(int64_t num_bytes);
    char* allocate_cell(int cell);
    bool is_done(const Queue& queue, Letter& letter);
    void sweep(Queue& queue);
    void sweep_front(Queue& queue);
    void sweep_all_now_and_then();

    mutable std::mutex mutex_;
    std::shared_ptr<Arena> arena_;
    FirstEnvelope* firsts_;
    std::vector<Queue> queues_;
    std::vector<char*> cells_[kNumCells];  // free ones
    int64_t limit_ = INT64_MAX, buffered_ = 0;
    double next_sweep_ = 0.0;  // of all
};

}  // namespace pycomm
