// Creation of an NCCL communicator, in bounded time.
#pragma once

#include <functional>
#include <memory>

#include "transport/nccl/library.h"
#include "transport/nccl/session.h"

namespace pycomm::nccl {

struct Creation {
    int rank, size, device;
    UniqueId id;
    // NCCL is told NCCL_ALGO=Ring through the environment, the only way it has: it reads the variable when it tunes a
    // new communicator. So the variable is set while such communicators are being made, put back as it was afterwards,
    // and meanwhile other communicators of this process wait for their turn. Communicators that other libraries make at
    // that very moment, and processes started then, see it too.
    bool ring;
    double timeout;                       // seconds
    std::function<void()> check_signals;  // called now and then; what it throws ends the creation
};

// Collective. A CommFailure when NCCL failed, or when the timeout passed before all ranks came; the creation is aborted
// then.
//
// The communicator is one that blocks: with blocking = 0, NCCL starts a thread for every operation and every group. For
// NCCL older than 2.22, whose creation could not be aborted, it is made with blocking = 0. NCCL_COMM_BLOCKING in the
// environment overrules that, and operations then work all the same.
std::shared_ptr<Session> create(const Library& library, const Creation& wanted);

}  // namespace pycomm::nccl
