#include "transport/process.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <new>
#include <string>

#include "base/error.h"
#include "transport/memory.h"

namespace pycomm {
namespace {

// A number in memory that the kernel clears in a child, however it was forked; null if the kernel cannot.
std::atomic<pid_t>* cleared_by_forks() {
    const auto bytes = static_cast<size_t>(page_bytes());
    void* page = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return nullptr;
    if (madvise(page, bytes, MADV_WIPEONFORK) == 0) return new (page) std::atomic<pid_t>(0);
    munmap(page, bytes);
    return nullptr;
}

// getpid() without a system call, which takes a twentieth of a small operation.
pid_t own_pid() {
    static std::atomic<pid_t>* const known = cleared_by_forks();
    if (known == nullptr) return getpid();
    pid_t pid = known->load(std::memory_order_relaxed);
    if (pid == 0) known->store(pid = getpid(), std::memory_order_relaxed);
    return pid;
}

}  // namespace

ProcessState state_of(pid_t pid) {
    if (pid <= 0) return ProcessState::kUnknown;
    errno = 0;
    std::ifstream status("/proc/" + std::to_string(pid) + "/status");
    if (!status) return errno == ENOENT ? ProcessState::kDead : ProcessState::kUnknown;
    ProcessState found = ProcessState::kUnknown;
    std::string line;
    while (std::getline(status, line)) {
        if (line.rfind("State:", 0) == 0) {
            size_t at = line.find_first_not_of(" \t", 6);
            char letter = at == std::string::npos ? '?' : line[at];
            found = letter == 'T' || letter == 't'   ? ProcessState::kStopped
                    : letter == 'Z' || letter == 'X' ? ProcessState::kDead
                                                     : ProcessState::kAlive;
        } else if (line.rfind("CoreDumping:", 0) == 0) {
            return line.find('1', 12) != std::string::npos ? ProcessState::kDumpingCore : found;
        }
    }
    return found;
}

pid_t peer_of(int socket) {
    ucred credentials{};
    socklen_t length = sizeof credentials;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return 0;
    return credentials.pid;
}

bool connection_closed(int socket) {
    pollfd state{socket, POLLRDHUP, 0};
    const bool closed = poll(&state, 1, 0) > 0 && (state.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
    // Callers look at the peer's memory next, and must see what it wrote before its end: its clock, the messages it
    // sent. A system call does not have to order memory accesses.
    std::atomic_thread_fence(std::memory_order_acquire);
    return closed;
}

void require_own_process(int rank, const std::string& operation, pid_t owner) {
    if (own_pid() == owner) return;
    throw CommFailure(rank, -1, operation, 0.0,
                      format("%s: this communicator belongs to process %d and was inherited by a fork; make one in the "
                             "new process",
                             operation.c_str(), owner));
}

}  // namespace pycomm
