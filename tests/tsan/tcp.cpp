// Ranks as threads over TCP: the calling threads, the watch thread, and threads that send, receive and close.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "driver.h"
#include "transport/hierarchical/group.h"
#include "transport/tcp/group.h"

namespace {

using TcpGroups = std::vector<std::unique_ptr<TcpGroup>>;
using Sockets = std::vector<std::vector<Descriptor>>;

// sockets[p][q]: rank p's end of a connection to rank q.
Sockets connected(int size) {
    Descriptor listener(socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* general = reinterpret_cast<sockaddr*>(&address);
    require(bind(listener.get(), general, length) == 0 && listen(listener.get(), 16) == 0, "listen");
    require(getsockname(listener.get(), general, &length) == 0, "getsockname");
    Sockets sockets(static_cast<size_t>(size));
    for (auto& row : sockets) row.resize(static_cast<size_t>(size));
    for (size_t p = 0; p < sockets.size(); ++p) {
        for (size_t q = 0; q < p; ++q) {
            sockets[p][q] = Descriptor(socket(AF_INET, SOCK_STREAM, 0));
            require(connect(sockets[p][q].get(), general, length) == 0, "connect");
            sockets[q][p] = Descriptor(accept(listener.get(), nullptr, nullptr));
            require(sockets[q][p].is_open(), "accept");
        }
    }
    return sockets;
}

TcpGroups make_tcp_groups(int size) {
    Sockets data = connected(size), more = connected(size), control = connected(size);
    TcpGroups groups;
    for (int p = 0; p < size; ++p) {
        const auto row = static_cast<size_t>(p);
        std::vector<std::vector<Descriptor>> links(static_cast<size_t>(size));
        for (size_t q = 0; q < links.size(); ++q) {
            links[q].push_back(std::move(data[row][q]));
            links[q].push_back(std::move(more[row][q]));
        }
        groups.push_back(std::make_unique<TcpGroup>(p, 7, std::move(links), std::move(control[row]),
                                                    std::vector<std::string>(static_cast<size_t>(size), "here"), 10.0,
                                                    [] {}));
        groups.back()->set_buffer_limit(1 << 20);
    }
    return groups;
}

void require_all(const std::vector<float>& found, float wanted, const char* what) {
    require(std::all_of(found.begin(), found.end(), [&](float each) { return each == wanted; }), what);
}

Buffer all_of(std::vector<float>& x) { return {x.data(), static_cast<int64_t>(x.size()), DType::kF32}; }

void collectives_over_tcp(TcpGroup& group, int64_t count, const AllPrograms& programs) {
    const auto size = static_cast<size_t>(group.size());
    const auto mine = static_cast<float>(group.rank() + 1), sum = static_cast<float>(size * (size + 1) / 2);
    std::vector<float> x(static_cast<size_t>(count), mine), whole(x.size() * size);
    group.all_reduce(all_of(x), ReduceOp::kSum, kTimeout);
    require_all(x, sum, "all_reduce over TCP");
    std::fill(x.begin(), x.end(), mine);
    group.all_gather(all_of(whole), all_of(x), kTimeout);
    group.reduce_scatter(all_of(x), all_of(whole), ReduceOp::kSum, kTimeout);
    require_all(x, mine * static_cast<float>(size), "reduce_scatter over TCP");
    group.broadcast(all_of(x), group.size() - 1, kTimeout);
    require_all(x, static_cast<float>(size * size), "broadcast over TCP");
    for (const auto& of_ranks : programs) {
        std::fill(x.begin(), x.end(), mine);
        group.run(of_ranks[static_cast<size_t>(group.rank())], all_of(x), ReduceOp::kSum, kTimeout);
        require_all(x, sum, "a schedule over TCP");
    }
    try {
        std::vector<float> other(x.size() + static_cast<size_t>(group.rank() == 0 ? 1 : 0));
        group.all_reduce(all_of(other), ReduceOp::kSum, kTimeout);
        fail("ranks disagree, and nobody says so");
    } catch (const ArgumentError&) {
    }
}

void messages_over_tcp(TcpGroup& group, int rounds) {
    const int next = (group.rank() + 1) % group.size(), before = (group.rank() + group.size() - 1) % group.size();
    for (int round = 0; round < rounds; ++round) {
        for (size_t count : {size_t{1}, size_t{3000}, size_t{90'000}}) {
            std::vector<float> sent(count, static_cast<float>(group.rank())), found(count);
            auto receipt = group.post_receive(all_of(found), 4, round % 2 == 0 ? before : -1, 5, nullptr);
            group.send(all_of(sent), 4, next, 5, kTimeout);
            require(receipt->wait(kTimeout) == before, "another source over TCP");
            require_all(found, static_cast<float>(before), "a message over TCP");
        }
    }
}

// One rank closes at some moment while all work.
void closing_over_tcp(int size, unsigned seed) {
    TcpGroups groups = make_tcp_groups(size);
    const int leaver = static_cast<int>(seed) % size;
    std::thread closer([&] {
        usleep(static_cast<useconds_t>(seed * 7919 % 20000));
        groups[static_cast<size_t>(leaver)]->close("the test wants it so");
    });
    std::atomic<int> failures{0};
    in_ranks(size, [&](int rank) {
        std::vector<float> x(50'000);
        try {
            while (true) groups[static_cast<size_t>(rank)]->all_reduce(all_of(x), ReduceOp::kMax, kTimeout);
        } catch (const CommFailure& failure) {
            if (rank != leaver && failure.peer != leaver)
                fail(std::string("another rank is blamed: ") + failure.what());
            ++failures;
        }
    });
    closer.join();
    require(failures == size, "a rank did not hear of it over TCP");
}

// Two hosts of two ranks each.
struct TwoHosts {
    TcpGroups flat = make_tcp_groups(4);
    Groups locals[2] = {make_groups(2, 0), make_groups(2, 0)};
    std::vector<std::unique_ptr<HierarchicalGroup>> groups;

    TwoHosts() {
        for (size_t p = 0; p < 4; ++p) {
            std::vector<std::vector<int>> hosts = {{0, 1}, {2, 3}};
            groups.push_back(
                std::make_unique<HierarchicalGroup>(*flat[p], *locals[p / 2][p % 2], std::move(hosts), [] {}));
        }
    }
};

void hierarchical(int64_t count) {
    TwoHosts all;
    in_ranks(4, [&](int rank) {
        HierarchicalGroup& group = *all.groups[static_cast<size_t>(rank)];
        const auto mine = static_cast<float>(rank + 1);
        std::vector<float> x(static_cast<size_t>(count), mine), whole(4 * x.size());
        group.all_reduce(all_of(x), ReduceOp::kSum, kTimeout);
        require_all(x, 10.0F, "all_reduce on several hosts");
        std::fill(x.begin(), x.end(), mine);
        group.all_gather(all_of(whole), all_of(x), kTimeout);
        group.reduce_scatter(all_of(x), all_of(whole), ReduceOp::kSum, kTimeout);
        require_all(x, 4.0F * mine, "reduce_scatter on several hosts");
        group.broadcast(all_of(x), 3, kTimeout);
        require_all(x, 16.0F, "broadcast on several hosts");
    });
    const int leaver = static_cast<int>(count % 4);
    std::thread closer([&] {
        usleep(20'000);
        all.groups[static_cast<size_t>(leaver)]->close("the test wants it so");
    });
    std::atomic<int> failures{0};
    in_ranks(4, [&](int rank) {
        std::vector<float> x(static_cast<size_t>(count));
        try {
            while (true) all.groups[static_cast<size_t>(rank)]->all_reduce(all_of(x), ReduceOp::kMax, kTimeout);
        } catch (const CommFailure&) {
            ++failures;
        }
    });
    closer.join();
    require(failures == 4, "a rank did not hear of it on several hosts");
}

}  // namespace

void over_tcp(int size, int rounds, const AllPrograms& programs, unsigned seed) {
    TcpGroups groups = make_tcp_groups(size);
    in_ranks(size, [&](int rank) {
        TcpGroup& group = *groups[static_cast<size_t>(rank)];
        std::thread other([&] { messages_over_tcp(group, rounds); });
        for (int round = 0; round < rounds; ++round) {
            for (int64_t count : {1, 3000, 30000, 300001}) collectives_over_tcp(group, count, programs);
        }
        other.join();
        group.barrier(kTimeout);
        group.close("the end");
    });
    closing_over_tcp(size, seed);
    for (int64_t count : {3001, 1'300'002}) hierarchical(count);
}
