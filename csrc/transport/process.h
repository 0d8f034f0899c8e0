// State of the processes behind the ranks, and of this one.
#pragma once

#include <sys/types.h>

#include <string>

namespace pycomm {

enum class ProcessState {
    kUnknown,  // it may not be inspected
    kAlive,
    kStopped,  // by a signal or a debugger
    kDumpingCore,
    kDead,
};

// Reads /proc. A pid is not reused while somebody holds a socket to its process, but only in practice. So use this to
// diagnose awaited peers, never to decide whom to trust.
ProcessState state_of(pid_t pid);

// The process that was at the other end of a Unix socket when it was connected; 0 if it is unknown, or outside our pid
// namespace.
pid_t peer_of(int socket);

// Whether the process at the other end has closed the socket, or ended. What it wrote to shared memory before is
// visible after this returns true.
bool connection_closed(int socket);

// Throws CommFailure in a process that inherited a communicator of process `owner` by a fork.
void require_own_process(int rank, const std::string& operation, pid_t owner);

}  // namespace pycomm
