// State of the processes behind the ranks, and of this one.
#pragma once

#include <sys/types.h>

#include <string>

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

// Whether the process at the other end has closed it, or ended. What it wrote to shared memory before is seen after.
bool connection_closed(int socket);

// Throws CommFailure in a process that inherited, by a fork, a communicator of process `owner`.
void require_own_process(int rank, const std::string& operation, pid_t owner);

}  // namespace pycomm
