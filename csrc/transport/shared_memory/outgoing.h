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

// This rank's own record of a message: it does not depend on what others write into the envelope.
struct Letter {
    Envelope* envelope;
    char* payload;
    int cell;      // index of the envelope's size
    char* block;   // arena block with the payload; null: the payload lies in the cell, or was freed
    int64_t cost;  // 0 once it is taken
};

// All methods are thread-safe.
class Outgoing {
   public:
    // Messages up to this size share a cell with their envelope.
    static constexpr int64_t kSmallBytes = (8 << 10) - static_cast<int64_t>(sizeof(Envelope));

    // firsts[p]: receives the offset of the first envelope for rank p.
    Outgoing(std::shared_ptr<Arena> arena, FirstEnvelope* firsts, int size);

    // Bytes that a message of `num_bytes` counts as buffered until it is taken.
    static int64_t cost_of(int64_t num_bytes);

    // Reserves `cost` bytes of the limit; returns false if fewer are free.
    bool reserve(int64_t cost);
    // Allocates a message without its content; its cost must be reserved. Throws OutOfMemory.
    Letter open(int64_t num_bytes, int64_t width, int64_t tag);
    // Appends the message to rank dst's list.
    void post(int dst, const Letter& letter);

    int64_t limit() const;
    void set_limit(int64_t num_bytes);
    int64_t buffered();
    // The bytes buffered for each rank, for errors.
    std::string describe();

    // Lets go of the arena without freeing what receivers may still read.
    void end();

   private:
    static constexpr int64_t kSmallestCell = 128;
    static constexpr int kNumCells = 7;  // 128 bytes to 8 KiB

    struct Queue {
        std::deque<Letter> under_way;
        Envelope* last = nullptr;
        uint64_t count = 0;
        size_t sweep_at = 64;  // length of under_way at which it is swept
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
    double next_sweep_ = 0.0;  // when all queues may be swept again
};

}  // namespace pycomm
