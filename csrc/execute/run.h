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
// It cannot deadlock. Of all messages that are not done, take the first one in the table: all messages that its two
// ranks handle before it are done. Its sender waits only for receives of earlier rounds and for earlier messages to be
// taken, all of which is done. Its receiver waits for messages of earlier rounds to be taken, which is done, and for
// its own messages of this round to be copied to the shadow. Those copies wait only for receives of earlier rounds and
// for messages of earlier rounds to be taken. So the message can move.
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

// All-reduces x in place; collective. kMean divides the sums at the end, rounding twice.
void run_program(SharedMemoryGroup& group, const NamedProgram& named, const Buffer& x, ReduceOp op, double timeout);

}  // namespace pycomm
