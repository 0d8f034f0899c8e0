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

// A message of this rank: what it knows itself, whatever others write into the envelope.
struct Letter {
    Envelope* envelope;
    char* payload;
    int cell;      // index of the envelope's size
    char* block;   // of the arena, that holds the payload; null where that lies in the cell, or was given back
    int64_t cost;  // 0 once it is taken
};

// All methods may be called by several threads.
class Outgoing {
   public:
    // Messages of at most so many bytes lie in one cell with their envelope.
    static constexpr int64_t kSmallBytes = (8 << 10) - static_cast<int64_t>(sizeof(Envelope));

    // firsts[p]: where the offset of the first envelope for rank p goes.
    Outgoing(std::shared_ptr<Arena> arena, FirstEnvelope* firsts, int size);

    // What a message of `num_bytes` counts for until it is taken.
    static int64_t cost_of(int64_t num_bytes);

    // Takes `cost` of what may be buffered, if so much is free.
    bool reserve(int64_t cost);
    // Makes a message, whose cost is reserved, without its content. Throws OutOfMemory.
    Letter open(int64_t num_bytes, int64_t width, int64_t tag);
    // Hands it to rank dst: its next message.
    void post(int dst, const Letter& letter);

    int64_t limit() const;
    void set_limit(int64_t num_bytes);
    int64_t buffered();
    // How many bytes are buffered for which ranks, for errors.
    std::string describe();

    // Gives the arena up, without freeing what receivers may still read.
    void end();

   private:
    static constexpr int64_t kSmallestCell = 128;
    static constexpr int kNumCells = 7;  // 128 bytes to 8 KiB

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
