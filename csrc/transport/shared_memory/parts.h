// Tables of what each rank sends to each other rank and where it lies, for collectives with arrays of unequal lengths.
//
// A rank writes its table into its mailbox before it announces the operation, and reads all tables afterwards. So all
// ranks know whether the lengths match and how many steps follow. Each rank decides how its own arrays travel:
//   mailbox    all of them are small: they follow its table.
//   arena      the receiver reads the array in the arena; one step at the end.
//   staged     segment i of the rank's staging area holds the i-th piece of each array, so that all receivers have
//              something to do in every step.
// An array that goes to several ranks is put into the mailbox, or staged, once.
#pragma once

#include <vector>

#include "transport/shared_memory/moves.h"

namespace pycomm {

// A row of a table: of one rank, about one peer.
struct Part {
    int64_t sends;     // bytes, to that peer
    int64_t receives;  // bytes, from that peer
    int64_t at;        // offset in the file of the array that is sent; if it is staged: ~(first peer that gets it)
};

class Parts {
   public:
    // Writes this rank's table and small arrays into its mailbox, before the announcement. receives[p]: bytes.
    Parts(Call& call, const SharedMemoryGroup& group, const std::vector<Buffer>& xs,
          const std::vector<int64_t>& receives);
    // Reads all tables, after the announcement. If two ranks disagree on a length, throws ArgumentError on every rank,
    // naming the first such pair.
    void exchange();

    // Calls use(i) for the i-th pieces of all arrays, once those that are staged have been written.
    template <class Use>
    void move(Use&& use) {
        if (num_segments_ == 0) use(0);  // everything can be read in place, as one piece
        pipeline(call_, num_segments_, [&](int64_t i) { stage(i); }, use);
        if (any_in_arena_) call_.step();  // the others have read
    }
    // Piece i of what rank p sends to this one: its range in bytes, and where it begins.
    Range piece(int p, int64_t i) const { return piece_of_bytes(part(p, call_.rank()).sends, i); }
    const char* address(int p, int64_t i) const;

   private:
    const Part& part(int from, int to) const {
        return tables_[static_cast<size_t>(from) * static_cast<size_t>(call_.size()) + static_cast<size_t>(to)];
    }
    bool is_first(int from, int to) const { return part(from, to).at == ~static_cast<int64_t>(to); }
    void require_possible(int p) const;
    void require_matches() const;
    // Bytes of a segment that an array takes.
    int64_t pitch(int64_t num_bytes) const;
    Range piece_of_bytes(int64_t num_bytes, int64_t i) const;
    void stage(int64_t i) const;

    Call& call_;
    const std::vector<Buffer>& xs_;
    std::vector<Part> tables_;  // by rank, then by peer
    int64_t num_segments_ = 0;
    bool any_in_arena_ = false;
};

}  // namespace pycomm
