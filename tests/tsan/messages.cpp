// Messages under ThreadSanitizer: threads of all ranks send and receive while others are in collectives.
#include "transport/shared_memory/messages.h"

#include <atomic>
#include <random>

#include "driver.h"

namespace {

struct Talk {
    Groups& groups;
    int rounds;
    unsigned seed;
};

int64_t bytes_of(unsigned seed, int tag, int round) {
    constexpr int64_t kSizes[] = {0, 4, 100, 5000, 8128, 8129, 70000, 300000};
    return kSizes[(seed + static_cast<unsigned>(tag * 3 + round)) % 8];
}

char content_of(int source, int dst, int tag, int round) {
    return static_cast<char>(source * 50 + dst * 10 + tag * 3 + round);
}

Buffer buffer_of(std::vector<char>& bytes) { return {bytes.data(), static_cast<int64_t>(bytes.size()), DType::kU8}; }

void require_content(const std::vector<char>& bytes, char wanted) {
    for (char byte : bytes) require(byte == wanted, "a message has another content");
}

// One thread of one rank: posts receives from all, sends to all, then waits, some of it in another order.
void talk(const Talk& all, int rank, int tag) {
    SharedMemoryGroup& group = *all.groups[static_cast<size_t>(rank)];
    const int size = group.size();
    std::minstd_rand random(all.seed * 100 + static_cast<unsigned>(rank * 10 + tag));
    for (int round = 0; round < all.rounds; ++round) {
        const auto bytes = static_cast<size_t>(bytes_of(all.seed, tag, round));
        std::vector<std::vector<char>> arrays(static_cast<size_t>(size), std::vector<char>(bytes));
        std::vector<ReceiptPtr> receipts(static_cast<size_t>(size));
        auto post = [&](int p) {
            receipts[static_cast<size_t>(p)] =
                group.messages_->post_receive(buffer_of(arrays[static_cast<size_t>(p)]), 1, p, tag, nullptr);
        };
        const bool early = random() % 2 == 0;
        for (int p = 0; p < size && early; ++p) {
            if (p != rank) post(p);
        }
        for (int i = 1; i < size; ++i) {
            const int dst = (rank + i) % size;
            std::vector<char> mine(bytes, content_of(rank, dst, tag, round));
            group.messages_->send(buffer_of(mine), 1, dst, tag, kTimeout);
            std::fill(mine.begin(), mine.end(), '\0');
        }
        for (int p = 0; p < size && !early; ++p) {
            if (p != rank) post(p);
        }
        for (int i = 1; i < size; ++i) {
            const auto p = static_cast<size_t>(random() % 2 == 0 ? (rank + i) % size : (rank + size - i) % size);
            if (static_cast<int>(p) != rank) group.messages_->is_completed(receipts[p]);
        }
        for (int i = size - 1; i > 0; --i) {
            const int p = (rank + i) % size;
            require(group.messages_->wait(receipts[static_cast<size_t>(p)], kTimeout) == p, "another source");
            require_content(arrays[static_cast<size_t>(p)], content_of(p, rank, tag, round));
            std::fill(arrays[static_cast<size_t>(p)].begin(), arrays[static_cast<size_t>(p)].end(), 'x');
        }
    }
}

// All ranks send to rank 0, which takes what comes.
void any_source(Groups& groups, int rank, int rounds) {
    SharedMemoryGroup& group = *groups[static_cast<size_t>(rank)];
    constexpr int kTag = 77;
    const int count = rounds * 20;
    std::vector<char> bytes(1000);
    if (rank != 0) {
        for (int i = 0; i < count; ++i) {
            std::fill(bytes.begin(), bytes.end(), content_of(rank, 0, kTag, i));
            group.messages_->send(buffer_of(bytes), 1, 0, kTag, kTimeout);
        }
        return;
    }
    std::vector<int> seen(static_cast<size_t>(group.size()));
    for (int i = 0; i < count * (group.size() - 1); ++i) {
        ReceiptPtr receipt = group.messages_->post_receive(buffer_of(bytes), 1, -1, kTag, nullptr);
        const int source = group.messages_->wait(receipt, kTimeout);
        require_content(bytes, content_of(source, 0, kTag, seen[static_cast<size_t>(source)]++));
    }
}

// Receives that are withdrawn while their messages come, and another thread copies them.
void cancelling(Groups& groups, int rank, int rounds) {
    SharedMemoryGroup& group = *groups[static_cast<size_t>(rank)];
    std::vector<char> last(1), my_last(1);
    ReceiptPtr the_end = group.messages_->post_receive(buffer_of(last), 1, (rank + 1) % group.size(), 79, nullptr);
    std::thread other_thread([&] { group.messages_->wait(the_end, kTimeout); });
    constexpr int kTag = 78;
    const int after = (rank + 1) % group.size(), before = (rank + group.size() - 1) % group.size();
    for (int i = 0; i < rounds * 5; ++i) {
        std::vector<char> mine(100000, content_of(rank, after, kTag, i)), other(100000), third(100000);
        ReceiptPtr receipt = group.messages_->post_receive(buffer_of(other), 1, before, kTag, nullptr);
        group.messages_->send(buffer_of(mine), 1, after, kTag, kTimeout);
        if (i % 3 == 0) group.messages_->is_completed(receipt);
        if (i % 3 == 1) usleep(static_cast<useconds_t>(i * 37 % 200));
        if (group.messages_->cancel(receipt)) {
            std::fill(other.begin(), other.end(), 'c');
            receipt = group.messages_->post_receive(buffer_of(third), 1, before, kTag, nullptr);
            group.messages_->wait(receipt, kTimeout);
            require_content(third, content_of(before, rank, kTag, i));
            require_content(other, 'c');
        } else {
            require_content(other, content_of(before, rank, kTag, i));
        }
    }
    group.messages_->send(buffer_of(my_last), 1, before, 79, kTimeout);
    other_thread.join();
}

// One rank closes while threads of all wait.
void closing(int size, unsigned seed) {
    Groups groups = make_groups(size, 0);
    const int leaver = static_cast<int>(seed) % size;
    std::atomic<int> failures{0};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([&, rank] {
            std::vector<char> bytes(20000);
            const int source = rank == leaver ? (rank + 1) % size : leaver;
            try {
                while (true) {
                    Messages& mine = *groups[static_cast<size_t>(rank)]->messages_;
                    ReceiptPtr receipt = mine.post_receive(buffer_of(bytes), 1, source, 1, nullptr);
                    mine.send(buffer_of(bytes), 1, source, 1, kTimeout);
                    mine.wait(receipt, kTimeout);
                }
            } catch (const CommFailure&) {
                ++failures;
            }
        });
    }
    usleep(static_cast<useconds_t>(seed * 7919 % 20000));
    groups[static_cast<size_t>(leaver)]->close("the test wants it so");
    for (std::thread& thread : threads) thread.join();
    require(failures == size, "a rank did not hear of it");
}

}  // namespace

void messages(int size, int rounds, unsigned seed) {
    constexpr int kTags = 2;
    Groups groups = make_groups(size, 0);
    // So little that senders wait, now and then; all receive meanwhile.
    for (auto& group : groups) group->set_buffer_limit(int64_t{3} * size * 310000);
    const Talk all{groups, rounds * 4, seed};
    in_ranks(size, [&](int rank) {
        std::vector<std::thread> threads;
        for (int tag = 0; tag < kTags; ++tag) threads.emplace_back([&, tag] { talk(all, rank, tag); });
        threads.emplace_back([&] { any_source(groups, rank, rounds); });
        for (int i = 0; i < rounds * 3; ++i) groups[static_cast<size_t>(rank)]->barrier(kTimeout);
        for (std::thread& thread : threads) thread.join();
        cancelling(groups, rank, rounds);
        groups[static_cast<size_t>(rank)]->barrier(kTimeout);
        require(groups[static_cast<size_t>(rank)]->buffered_bytes() == 0, "something was not taken");
    });
    for (unsigned i = 0; i < 4; ++i) closing(size, seed + i);
}
