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
    // Selects the ring algorithm by NCCL_ALGO=Ring in the environment, which NCCL reads when it tunes a new
    // communicator; it offers no other way. So the variable is set while such communicators are created, and restored
    // afterwards. Meanwhile other creations in this process wait for their turn. Communicators that other libraries
    // create at that moment, and processes started then, see the variable too.
    bool ring;
    double timeout;                       // seconds
    std::function<void()> check_signals;  // called from time to time; if it throws, the creation ends
};

// Collective. Throws CommFailure if NCCL fails, or if the timeout passes before all ranks have joined; the creation is
// then aborted.
//
// The communicator is a blocking one, because with blocking = 0 NCCL starts a thread for every operation and every
// group. NCCL older than 2.22 cannot abort a blocking creation, so it gets blocking = 0. NCCL_COMM_BLOCKING in the
// environment overrides this; operations work either way.
std::shared_ptr<Session> create(const Library& library, const Creation& wanted);

}  // namespace pycomm::nccl
