// One rank's part of a schedule, as pycomm/schedule/program.py projects it from the table.
//
// Sends and receives are each in the order of the table. What each must wait for on this rank is computed beforehand,
// as a number of receives or sends that must come first: "after n" means after the first n.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pycomm {

struct Send {
    int peer;
    int64_t chunk, count;
    // A message of the same round changes these chunks: the peer reads them from the shadow (see run.cpp).
    bool conflict;
    // The shadow must be written for this send; otherwise an earlier message of the same round has written it.
    bool fresh;
    int64_t after_received;  // the last of which writes these chunks
    int64_t after_taken;     // sends whose place in the shadow this one reuses
};

struct Receive {
    int peer;
    int64_t chunk, count;
    bool reduces;
    bool from_shadow;     // the peer's send is in conflict
    int64_t after_taken;  // sends of these chunks, in place, of earlier rounds
    int64_t after_sent;   // sends of these chunks, of this or earlier rounds: their shadow must be written
};

struct Program {
    int rank, size;  // whose it is
    int64_t num_chunks;
    std::vector<Send> sends;
    std::vector<Receive> receives;

    bool has_conflicts() const;
    // Chunk c of `count` elements begins at border(c, count).
    int64_t border(int64_t c, int64_t count) const {
        return static_cast<int64_t>(static_cast<__int128>(count) * c / num_chunks);
    }
};

struct NamedProgram {
    Program program;
    std::string name;  // for errors
    uint64_t digest;   // of the whole table: equal on all ranks
};

// {num_chunks, sends, receives, then 7 numbers for each send and 7 for each receive, in the order of the fields}.
// Throws ArgumentError unless every index is in range.
Program parse_program(const int64_t* words, int64_t num_words, int rank, int size);

}  // namespace pycomm
