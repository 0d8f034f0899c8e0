// Runs programs over TCP.
//
// Messages between two ranks follow one another in the order of the program, without headers. A send needs no copy of
// its own: once the bytes have left, the kernel has one. So a receive that writes what is sent waits until it has left,
// piece by piece. Meanwhile it is received into memory beside the array, one piece at a time.
//
// It cannot deadlock. Of all messages that are not done, take the first one in the table: all messages that its two
// ranks handle before it are done, so its sender sends it, as far as the receiver takes it. The receiver takes its next
// piece into memory beside the array at any time. To add it, it waits only for its own sends of this or an earlier
// round to leave, piece by piece, and their receivers take those pieces likewise.
#pragma once

#include "base/buffer.h"
#include "kernels/reduce_op.h"
#include "transport/program.h"
#include "transport/tcp/call.h"

namespace pycomm {

// All-reduces x in place; the call has begun. kMean divides the sums at the end, rounding twice.
void run_over_tcp(TcpCall& call, const Program& program, const Buffer& x, ReduceOp op);

}  // namespace pycomm
