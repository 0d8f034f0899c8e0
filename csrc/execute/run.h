// Runs programs over shared memory.
//
// Nothing is sent: the receiver reads a message from the sender's memory and adds it to its own in the same pass. The
// sender only says how far it may read. Where the sender's chunks lie:
//   in place     in x itself, if x is in the arena and no message of the same round changes them.
//   the shadow   otherwise: an array in the arena as long as x, to which the sender copies them first.
// Messages move in segments, so that a chunk is passed on before its end has arrived, and while it is still in a cache.
// Each rank handles its sends in order, and its receives in order; sends and receives wait for each other only where
// one changes what the other reads.
//
// It cannot deadlock. Of all messages that are not done, take the first one of the table: everything that its two ranks
// handle before it is done. Its sender waits for receives of earlier rounds and for earlier messages to be taken: done.
// Its receiver waits for messages of earlier rounds to be taken, done, and for messages of its own of this round that
// must be copied to the shadow; these in turn wait only for receives of earlier rounds and for messages of earlier
// rounds to be taken. So it can move.
#pragma once

#include <string>

#include "base/buffer.h"
#include "execute/program.h"
#include "kernels/reduce_op.h"
#include "transport/shared_memory/group.h"

namespace pycomm {

struct NamedProgram {
    Program program;
    std::string name;  // for errors
    uint64_t digest;   // of the whole table: equal on all ranks
};

// All-reduces x in place; collective. kMean divides the sums in the end, rounding twice.
void run_program(SharedMemoryGroup& group, const NamedProgram& named, const Buffer& x, ReduceOp op, double timeout);

}  // namespace pycomm
