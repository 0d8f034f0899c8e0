// Runs programs over shared memory.
//
// Nothing is sent: the receiver takes a message out of the sender's memory, adding it to its own in the same pass. The
// sender only says how far it may. Where the sender's chunks lie:
//   in place   in x itself, if x is in the arena and no message of the same round changes them.
//   the twin   otherwise: an array in the arena as long as x, to which the sender copies them first.
// Messages move in segments, so that a chunk is passed on while its end is still to come, and is still in a cache when
// it is. Each rank handles its sends in order, and its receives in order; sends and receives wait for each other only
// where one changes what the other reads.
//
// It cannot come to a standstill: of all messages that are not done, take the first one of the table. Whatever its two
// ranks handle before it is done. What its sender waits for are receives of earlier rounds and takings of earlier
// messages: done. What its receiver waits for are takings of messages of earlier rounds, done, and messages of its own
// of this round that must be copied to the twin: these in turn wait only for receives of earlier rounds and takings of
// messages of earlier rounds. So it can move.
#pragma once

#include <string>

#include "base/buffer.h"
#include "execute/program.h"
#include "kernels/reduce.h"
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
