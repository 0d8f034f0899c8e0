// Creation and end of an NCCL communicator: it is made without blocking and ended without hanging.
#pragma once

#include <functional>

#include "transport/nccl/library.h"

namespace pycomm::nccl {

struct Creation {
    int rank, size, device;
    UniqueId id;
    // NCCL is told NCCL_ALGO=Ring through the environment, the only way it has: it reads the variable when it tunes a
    // new communicator, in a thread of its own. So the variable is set while such communicators are being made, put
    // back as it was afterwards, and meanwhile other communicators of this process wait for their turn. Communicators
    // that other libraries make at that very moment, and processes started then, see it too.
    bool ring;
    double timeout;                       // seconds
    std::function<void()> check_signals;  // called now and then; what it throws ends the creation
};

// Collective. A CommFailure when NCCL failed, or when the timeout passed before all ranks came.
//
// NCCL_COMM_BLOCKING=1 in the environment overrules us: NCCL then waits for the other ranks inside the call, without
// regard to the timeout.
Comm create(const Library& library, const Creation& wanted);

// Ends a communicator that works and has nothing left to do.
void finish(const Library& library, Comm comm, int device);
// Ends one that does not, and the operations that it has on the device.
void abort(const Library& library, Comm comm, int device);
// Neither throws. Both run in a thread of their own that is left behind with what it holds if NCCL does not come back
// within some seconds: a process must be able to end although a GPU hangs.

// Between two looks at something that NCCL does, `waited` seconds after it began: short at first, at most 1 ms.
void pause_between_looks(double waited);

}  // namespace pycomm::nccl
