// What the parts of the driver share: groups whose ranks are threads.
#pragma once

#include <sys/mman.h>
#include <sys/socket.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "transport/shared_memory/call.h"

using namespace pycomm;

inline constexpr double kTimeout = 300.0;
inline constexpr int64_t kArenaBytes = 48 << 20;

[[noreturn]] inline void fail(const std::string& what) {
    std::fprintf(stderr, "driver: %s\n", what.c_str());
    std::_Exit(3);
}

inline void require(bool good, const char* what) {
    if (!good) fail(what);
}

using Groups = std::vector<std::unique_ptr<SharedMemoryGroup>>;

// One group: a member for each rank.
inline Groups make_groups(int size, uint32_t first_clock) {
    const int64_t bytes = header_bytes(size) + kArenaBytes;
    std::vector<std::shared_ptr<Arena>> arenas;
    for (int p = 0; p < size; ++p) {
        Descriptor file(memfd_create("pycomm-tsan", 0));
        require(ftruncate(file.get(), bytes) == 0, "ftruncate");
        arenas.push_back(make_arena(std::move(file), size, bytes));
    }
    std::vector<std::vector<Descriptor>> sockets(static_cast<size_t>(size));
    for (auto& row : sockets) row.resize(static_cast<size_t>(size));
    for (size_t p = 0; p < sockets.size(); ++p) {
        for (size_t q = 0; q < p; ++q) {
            int pair[2];
            require(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
            sockets[p][q] = Descriptor(pair[0]);
            sockets[q][p] = Descriptor(pair[1]);
        }
    }
    Groups groups;
    for (int p = 0; p < size; ++p) {
        std::vector<std::shared_ptr<Mapping>> peers;
        for (int q = 0; q < size; ++q) peers.push_back(q == p ? nullptr : arenas[static_cast<size_t>(q)]->mapping());
        groups.push_back(std::make_unique<SharedMemoryGroup>(p, arenas[static_cast<size_t>(p)], std::move(peers),
                                                             std::move(sockets[static_cast<size_t>(p)]), [] {}));
        groups.back()->clock_ = first_clock;
        groups.back()->control(p).clock = first_clock;
    }
    return groups;
}

inline void in_ranks(int size, const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
}

// By schedule, each rank's program.
using AllPrograms = std::vector<std::vector<NamedProgram>>;

// Messages between all ranks, of several threads each.
void messages(int size, int rounds, unsigned seed);
// Collectives, schedules and messages over TCP.
void over_tcp(int size, int rounds, const AllPrograms& programs, unsigned seed);
