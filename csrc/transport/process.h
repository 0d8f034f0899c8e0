// What the system says of another process.
#pragma once

#include <sys/types.h>

namespace pycomm {

enum class ProcessState {
    kUnknown,  // it may not be looked at
    kAlive,
    kStopped,  // by a signal or a debugger
    kDumpingCore,
    kDead,
};

// Reads /proc. A pid is not taken by another process while somebody holds a socket to this one only in practice: ask
// about peers that are waited for, not to decide who is trusted.
ProcessState state_of(pid_t pid);

// The process at the other end of a Unix socket when it was connected; 0 where it is in no namespace of ours, or
// unknown.
pid_t peer_of(int socket);

}  // namespace pycomm
