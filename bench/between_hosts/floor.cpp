// Floor of an all-reduce between hosts: plain sockets, and one thread that adds what comes while more of it is on its
// way. A sum of float32 in place; one stream between every two ranks.
//
//     floor RANK PORT ADDRESS...        (the addresses of all ranks, in order)
//
// Reads lines "WAY SPIN_MICROSECONDS ELEMENTS CALLS" from the standard input of every rank. Each is answered by a
// line with the seconds per call on this rank, of so many calls back to back after a barrier. Every sum is verified
// once before.
//
// ring: each rank sends as many bytes as it must at least. Between two hosts halves are exchanged, then results.
// direct: every rank sends all it has to every other. One message after another takes longer than the bytes of a small
// array do.

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPieceBytes = 256 << 10;  // per system call
constexpr int kConnectSeconds = 30;
constexpr std::chrono::microseconds kAlone(5);  // of trying again
constexpr int kPollMilliseconds = 60'000;
constexpr int kMostWarmUpCalls = 10;    // as in ranks.py
constexpr uint32_t kModulus = 1 << 20;  // of the numbers that are verified: sums of sixteen are exact

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "floor: %s: %s\n", what, std::strerror(errno));
    std::exit(1);
}

[[noreturn]] void fail_wrong(const std::string& what) {
    std::fprintf(stderr, "floor: %s\n", what.c_str());
    std::exit(1);
}

// Returns how many bytes have gone or come: 0 if none can at present.
size_t moved_bytes(ssize_t result) {
    if (result > 0) return static_cast<size_t>(result);
    if (result == 0) fail_wrong("another rank has ended");
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) fail("send or receive");
    return 0;
}

size_t try_send(int socket, const char* data, size_t num_bytes) {
    return moved_bytes(send(socket, data, std::min(num_bytes, kPieceBytes), MSG_DONTWAIT | MSG_NOSIGNAL));
}

size_t try_receive(int socket, char* data, size_t num_bytes) {
    return moved_bytes(recv(socket, data, std::min(num_bytes, kPieceBytes), MSG_DONTWAIT));
}

// Waits until something moves: first by trying again and again, for as long as the caller has asked for.
class Wait {
   public:
    explicit Wait(std::chrono::microseconds spin) : spin_(spin) {}

    void has_moved() { idle_ = false; }

    void wait(std::vector<pollfd>& events) {
        if (spin_.count() > 0) {
            const auto now = Clock::now();
            if (!idle_) {
                idle_ = true;
                since_ = now;
            }
            if (now - since_ < spin_) {
                if (now - since_ > kAlone) sched_yield();  // to the other rank, should it wait for this core
                return;
            }
        }
        const int ready = poll(events.data(), events.size(), kPollMilliseconds);
        if (ready == 0) fail_wrong("nothing has moved for a minute");
        if (ready < 0 && errno != EINTR) fail("poll");
        idle_ = false;
    }

   private:
    std::chrono::microseconds spin_;
    bool idle_ = false;
    Clock::time_point since_;
};

sockaddr_in socket_address(const char* text, int port) {
    sockaddr_in found{};
    found.sin_family = AF_INET;
    found.sin_port = htons(static_cast<uint16_t>(port));
    if (inet_pton(AF_INET, text, &found.sin_addr) != 1) fail_wrong(std::string("no address: ") + text);
    return found;
}

int connected_to(const sockaddr_in& address) {
    const auto deadline = Clock::now() + std::chrono::seconds(kConnectSeconds);
    for (;;) {
        const int made = socket(AF_INET, SOCK_STREAM, 0);
        if (made < 0) fail("socket");
        if (connect(made, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return made;
        if (Clock::now() > deadline) fail("connect");
        close(made);
        usleep(10'000);
    }
}

// Returns a socket for each rank, connected to it; -1 for this one. The higher rank of two connects.
std::vector<int> connect_all(int rank, int port, const std::vector<const char*>& addresses) {
    const int one = 1;
    const sockaddr_in own = socket_address(addresses[static_cast<size_t>(rank)], port);
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, reinterpret_cast<const sockaddr*>(&own), sizeof own) < 0) fail("bind");
    if (listen(listener, 128) < 0) fail("listen");
    std::vector<int> sockets(addresses.size(), -1);
    for (size_t other = 0; other < static_cast<size_t>(rank); ++other) {
        sockets[other] = connected_to(socket_address(addresses[other], port));
        if (send(sockets[other], &rank, sizeof rank, MSG_NOSIGNAL) != sizeof rank) fail("send");
    }
    for (size_t missing = addresses.size() - static_cast<size_t>(rank) - 1; missing > 0; --missing) {
        const int made = accept(listener, nullptr, nullptr);
        int other = 0;
        if (made < 0 || recv(made, &other, sizeof other, MSG_WAITALL) != sizeof other) fail("accept");
        sockets.at(static_cast<size_t>(other)) = made;
    }
    for (const int each : sockets) {
        if (each >= 0) setsockopt(each, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    close(listener);
    return sockets;
}

class Ranks {
   public:
    Ranks(int rank, std::vector<int> sockets)
        : rank_(static_cast<size_t>(rank)), size_(sockets.size()), sockets_(std::move(sockets)) {
        next_ = sockets_[(rank_ + 1) % size_];
        previous_ = sockets_[(rank_ + size_ - 1) % size_];
        scratch_.resize(kPieceBytes / sizeof(float));
    }

    // For how long to try again before a wait sleeps.
    void set_spin(std::chrono::microseconds spin) { spin_ = spin; }

    void barrier() { exchange("b", 1); }

    void direct(float* x, size_t count) {
        exchange(reinterpret_cast<const char*>(x), sizeof(float) * count);
        for (size_t other = 0; other < size_; ++other) {
            const auto* theirs = reinterpret_cast<const float*>(received_[other].data());
            for (size_t i = 0; other != rank_ && i < count; ++i) x[i] += theirs[i];
        }
    }

    // In step s a rank sends chunk `rank - s` and receives chunk `rank - 1 - s`, which is what it sends in the next
    // step: so each byte is passed on as soon as it is there, whatever else of its chunk is still missing. What comes
    // in the first half of the steps is added, what comes later is a result.
    void ring(float* x, size_t count) {
        const size_t steps = 2 * (size_ - 1);
        Place out{0, 0}, in{0, 0};
        size_t held = 0;  // bytes of a float that has not come as a whole
        char* const scratch = reinterpret_cast<char*>(scratch_.data());
        Wait wait(spin_);
        std::vector<pollfd> events;
        for (;;) {
            while (out.step < steps && out.done == sent_in(out.step, count).num_bytes) out = {out.step + 1, 0};
            while (in.step < steps && in.done == sent_in(in.step + 1, count).num_bytes) in = {in.step + 1, 0};
            if (out.step == steps && in.step == steps) return;
            bool moved = false;
            const Chunk leaving = sent_in(out.step, count), coming = sent_in(in.step + 1, count);
            const size_t there = out.step <= in.step ? leaving.num_bytes : out.step == in.step + 1 ? in.done : 0;
            const bool can_send = out.step < steps && there > out.done;
            if (can_send) {
                const size_t sent = try_send(next_, bytes(x) + leaving.start + out.done, there - out.done);
                out.done += sent;
                moved |= sent > 0;
            }
            if (in.step < steps) {
                char* const target = bytes(x) + coming.start + in.done;
                const size_t missing = coming.num_bytes - in.done;
                size_t came;
                if (in.step < size_ - 1) {
                    came = try_receive(previous_, scratch + held, std::min(missing, kPieceBytes) - held);
                    held = add(reinterpret_cast<float*>(target), held + came, &in.done);
                } else {
                    came = try_receive(previous_, target, missing);
                    in.done += came;
                }
                moved |= came > 0;
            }
            if (moved) {
                wait.has_moved();
                continue;
            }
            events.clear();
            if (can_send) events.push_back({next_, POLLOUT, 0});
            if (in.step < steps) events.push_back({previous_, POLLIN, 0});
            wait.wait(events);
        }
    }

   private:
    struct Place {
        size_t step, done;
    };

    struct Chunk {
        size_t start, num_bytes;
    };

    static char* bytes(float* x) { return reinterpret_cast<char*>(x); }

    Chunk sent_in(size_t step, size_t count) const {
        const size_t chunk = (rank_ + 2 * size_ - step) % size_;
        const size_t first = count * chunk / size_, last = count * (chunk + 1) / size_;
        return {sizeof(float) * first, sizeof(float) * (last - first)};
    }

    // Adds whole floats out of the scratch memory, and counts their bytes; returns how many bytes are left over there.
    size_t add(float* target, size_t num_bytes, size_t* done) {
        const size_t whole = num_bytes / sizeof(float), left = num_bytes % sizeof(float);
        const float* const given = scratch_.data();
        for (size_t i = 0; i < whole; ++i) target[i] += given[i];
        if (left > 0) std::memcpy(scratch_.data(), given + whole, left);
        *done += sizeof(float) * whole;
        return left;
    }

    // Sends the same bytes to every other rank, and receives as many from each.
    void exchange(const char* data, size_t num_bytes) {
        received_.resize(size_);
        for (auto& each : received_) {
            if (each.size() < num_bytes) each.resize(num_bytes);
        }
        std::vector<size_t> sent(size_, 0), came(size_, 0);
        Wait wait(spin_);
        std::vector<pollfd> events;
        for (;;) {
            bool moved = false;
            events.clear();
            for (size_t other = 0; other < size_; ++other) {
                if (other == rank_) continue;
                short wanted = 0;
                if (sent[other] < num_bytes) {
                    const size_t k = try_send(sockets_[other], data + sent[other], num_bytes - sent[other]);
                    sent[other] += k;
                    moved |= k > 0;
                    if (sent[other] < num_bytes) wanted |= POLLOUT;
                }
                if (came[other] < num_bytes) {
                    char* const target = received_[other].data() + came[other];
                    const size_t k = try_receive(sockets_[other], target, num_bytes - came[other]);
                    came[other] += k;
                    moved |= k > 0;
                    if (came[other] < num_bytes) wanted |= POLLIN;
                }
                if (wanted != 0) events.push_back({sockets_[other], wanted, 0});
            }
            if (events.empty()) return;
            if (moved) {
                wait.has_moved();
            } else {
                wait.wait(events);
            }
        }
    }

    size_t rank_, size_;
    std::chrono::microseconds spin_{0};
    std::vector<int> sockets_;
    int next_, previous_;
    std::vector<float> scratch_;
    std::vector<std::vector<char>> received_;
};

uint32_t number(size_t rank, size_t i) { return static_cast<uint32_t>(i * 7919 + rank * 1000003) % kModulus; }

}  // namespace

int main(int argc, char** argv) {
    if (argc < 5) fail_wrong("wanted: RANK PORT ADDRESS ADDRESS...");
    const int rank = std::atoi(argv[1]);
    const std::vector<const char*> addresses(argv + 3, argv + argc);
    const size_t size = addresses.size();
    if (size > 16 || rank < 0 || static_cast<size_t>(rank) >= size) fail_wrong("wanted 2 to 16 ranks");
    Ranks ranks(rank, connect_all(rank, std::atoi(argv[2]), addresses));
    std::vector<float> x;
    char way[8];
    size_t count;
    int spin, calls;
    while (std::scanf("%7s %d %zu %d", way, &spin, &count, &calls) == 4) {
        ranks.set_spin(std::chrono::microseconds(spin));
        const auto all_reduce = std::strcmp(way, "ring") == 0 ? &Ranks::ring : &Ranks::direct;
        if (x.size() < count) x.resize(count);
        for (size_t i = 0; i < count; ++i) x[i] = static_cast<float>(number(static_cast<size_t>(rank), i));
        ranks.barrier();
        (ranks.*all_reduce)(x.data(), count);
        for (size_t i = 0; i < count; ++i) {
            uint32_t sum = 0;
            for (size_t other = 0; other < size; ++other) sum += number(other, i);
            if (x[i] != static_cast<float>(sum)) fail_wrong("wrong sum of element " + std::to_string(i));
        }
        std::fill_n(x.data(), count, 0.0f);  // which stays so, however often it is summed
        ranks.barrier();
        for (int call = 0; call < std::min(calls, kMostWarmUpCalls); ++call) (ranks.*all_reduce)(x.data(), count);
        ranks.barrier();
        const auto start = Clock::now();
        for (int call = 0; call < calls; ++call) (ranks.*all_reduce)(x.data(), count);
        const std::chrono::duration<double> seconds = Clock::now() - start;
        ranks.barrier();
        std::printf("%.9f\n", seconds.count() / calls);
        std::fflush(stdout);
    }
    return 0;
}
