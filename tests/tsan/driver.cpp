// Ranks as threads over the real transport, for ThreadSanitizer: every file is mapped once, so that what two ranks do
// to one byte happens at one address. Built with -fno-access-control, to set clocks.
//
//   driver PROGRAMS RANKS ROUNDS SEED
//
// PROGRAMS: records of int64: ranks, schedule, rank, digest, number of words, words (see transport/program.h).
#include "driver.h"

#include <atomic>
#include <cstdlib>
#include <map>

#include "transport/program.h"

namespace {

// By schedule, each rank's program.
using Programs = std::map<int64_t, std::vector<NamedProgram>>;

Programs read_programs(const char* path, int size) {
    std::FILE* file = std::fopen(path, "rb");
    if (file == nullptr) fail("no programs");
    Programs programs;
    int64_t header[5];
    while (std::fread(header, sizeof header, 1, file) == 1) {
        std::vector<int64_t> words(static_cast<size_t>(header[4]));
        require(std::fread(words.data(), sizeof(int64_t), words.size(), file) == words.size(), "programs end early");
        if (header[0] != size) continue;
        Program program = parse_program(words.data(), header[4], static_cast<int>(header[2]), size);
        programs[header[1]].push_back({std::move(program), "schedule", static_cast<uint64_t>(header[3])});
    }
    std::fclose(file);
    return programs;
}

// Floats, in the arena or not. Freed late: peers may still read what a broken group leaves.
class Floats {
   public:
    Floats(SharedMemoryGroup& group, int64_t count, bool in_arena) : count_(count) {
        if (in_arena) {
            arena_ = group.arena();
            data_ = reinterpret_cast<float*>(arena_->allocate(count * 4));
        } else {
            own_.resize(static_cast<size_t>(count));
            data_ = own_.data();
        }
    }
    ~Floats() {
        if (arena_ != nullptr) arena_->release(reinterpret_cast<char*>(data_));
    }
    Floats(const Floats&) = delete;
    Floats& operator=(const Floats&) = delete;

    Buffer buffer() const { return {data_, count_, DType::kF32}; }
    void fill(float value) { std::fill(data_, data_ + count_, value); }
    void require_all(float value, const char* what) const {
        for (int64_t i = 0; i < count_; ++i) {
            if (data_[i] != value)
                fail(std::string(what) + format(": %g at %lld, wanted %g", data_[i], static_cast<long long>(i), value));
        }
    }
    float* data() { return data_; }

   private:
    int64_t count_;
    std::shared_ptr<Arena> arena_;
    std::vector<float> own_;
    float* data_;
};

// What this rank reduces itself is somewhere else, where the array is large enough, and nothing in the array.
void own_part_apart(SharedMemoryGroup& group, Floats& x, float sum) {
    const auto mine = static_cast<float>(group.rank() + 1);
    x.fill(mine);
    const Range share = group.own_share(x.buffer());
    std::vector<float> elsewhere(static_cast<size_t>(share.size()), mine);
    std::fill(x.data() + share.begin, x.data() + share.end, -1.0f);
    OwnPart own{share.begin, {}};
    if (share.size() > 0) own.pieces.push_back({elsewhere.data(), share.size(), DType::kF32});
    const float largest = group.all_reduce_apart(x.buffer(), own, ReduceOp::kSum, kTimeout);
    std::fill(elsewhere.begin(), elsewhere.end(), -1.0f);
    x.require_all(sum, "all_reduce_apart");
    require(largest >= (share.size() > 0 ? mine : 0.0f) && largest <= static_cast<float>(group.size()), "largest");
}

// The same of a reduce-scatter: nothing of this rank's own part in the array.
void own_part_of_scatter_apart(SharedMemoryGroup& group, Floats& x, int64_t count, float sum) {
    const auto mine = static_cast<float>(group.rank() + 1);
    x.fill(mine);
    std::vector<Buffer> parts;
    for (int p = 0; p < group.size(); ++p) parts.push_back({x.data() + p * count, count, DType::kF32});
    const Buffer out = parts[static_cast<size_t>(group.rank())];
    std::vector<float> elsewhere(static_cast<size_t>(count), mine);
    std::fill_n(static_cast<float*>(out.data), count, -1.0f);
    const std::vector<Buffer> pieces{{elsewhere.data(), count, DType::kF32}};
    const float largest = group.reduce_scatter_apart(out, parts, ReduceOp::kSum, kTimeout, pieces);
    const auto* found = static_cast<const float*>(out.data);
    require(std::all_of(found, found + count, [&](float each) { return each == sum; }), "reduce_scatter_apart");
    require(largest == (count > 0 ? mine : 0.0f), "largest");
}

// All collectives, again and again on the same arrays, which each rank fills anew as soon as it may.
void collectives(SharedMemoryGroup& group, int64_t count, bool in_arena, int rounds) {
    const int size = group.size(), rank = group.rank();
    Floats x(group, count, in_arena), whole(group, count * size, in_arena);
    const auto sum = static_cast<float>(size * (size + 1) / 2);
    for (int round = 0; round < rounds; ++round) {
        x.fill(static_cast<float>(rank + 1));
        group.all_reduce(x.buffer(), ReduceOp::kSum, kTimeout);
        x.require_all(sum, "all_reduce");
        own_part_apart(group, x, sum);
        own_part_of_scatter_apart(group, whole, count, sum);
        x.fill(static_cast<float>(rank + 1));
        group.all_gather(whole.buffer(), x.buffer(), kTimeout);
        x.fill(0.0f);
        for (int p = 0; p < size; ++p) {
            for (int64_t i = 0; i < count; i += 97) {
                require(whole.data()[p * count + i] == static_cast<float>(p + 1), "all_gather");
            }
        }
        whole.fill(static_cast<float>(rank + 1));
        group.reduce_scatter(x.buffer(), whole.buffer(), ReduceOp::kSum, kTimeout);
        whole.fill(0.0f);
        x.require_all(sum, "reduce_scatter");
        const int root = round % size;
        x.fill(rank == root ? 9.0f : 0.0f);
        group.broadcast(x.buffer(), root, kTimeout);
        x.require_all(9.0f, "broadcast");
        x.fill(0.0f);
        Floats parts(group, count * size, in_arena);
        parts.fill(static_cast<float>(rank + 1));
        group.all_to_all(whole.buffer(), parts.buffer(), kTimeout);
        parts.fill(0.0f);
        for (int p = 0; p < size; ++p) require(whole.data()[p * count] == static_cast<float>(p + 1), "all_to_all");
        if (round % 3 == 0) group.barrier(kTimeout);
        if (round % 4 == rank % 4) {
            try {
                group.refuse("the test wants it so", kTimeout);
            } catch (const ArgumentError&) {  // of another rank, that refuses too
            }
        } else {
            try {
                group.barrier(kTimeout);
            } catch (const ArgumentError&) {
            }
        }
    }
}

// Likewise those whose arrays differ from rank to rank, some of them in the arena.
void uneven(SharedMemoryGroup& group, int64_t count, bool in_arena, int rounds) {
    const int size = group.size(), rank = group.rank();
    auto length = [&](int from, int to) { return count * ((from + to) % 3) + 1; };
    const auto sum = static_cast<float>(size * (size + 1) / 2);
    std::vector<std::unique_ptr<Floats>> mine, theirs, same;
    std::vector<Buffer> xs, outs, shared(static_cast<size_t>(size)), contributions;
    for (int p = 0; p < size; ++p) {
        mine.push_back(std::make_unique<Floats>(group, length(rank, p), in_arena && p % 2 == rank % 2));
        theirs.push_back(std::make_unique<Floats>(group, length(p, rank), in_arena));
        same.push_back(std::make_unique<Floats>(group, length(0, p), in_arena && p % 2 == 0));
        xs.push_back(mine.back()->buffer());
        outs.push_back(theirs.back()->buffer());
        contributions.push_back(same.back()->buffer());
    }
    Floats x(group, count, in_arena), out(group, length(0, rank), in_arena);
    for (int round = 0; round < rounds; ++round) {
        for (auto& floats : mine) floats->fill(static_cast<float>(rank + 1));
        group.all_to_all_v(outs, xs, kTimeout);
        for (auto& floats : mine) floats->fill(0.0f);
        for (int p = 0; p < size; ++p) theirs[static_cast<size_t>(p)]->require_all(static_cast<float>(p + 1), "uneven");
        const int root = round % size;
        x.fill(rank == root ? 7.0f : 0.0f);
        std::vector<Buffer> received(static_cast<size_t>(size)), sent(static_cast<size_t>(size));
        for (auto& to : sent) to = rank == root ? x.buffer() : Buffer();
        received[static_cast<size_t>(root)] = x.buffer();  // rank's own array stays where it is
        group.all_to_all_v(received, sent, kTimeout);
        x.require_all(7.0f, "the same to all");
        for (auto& floats : same) floats->fill(static_cast<float>(rank + 1));
        group.reduce_scatter_v(out.buffer(), contributions, ReduceOp::kSum, kTimeout);
        for (auto& floats : same) floats->fill(0.0f);
        out.require_all(sum, "reduce_scatter_v");
        x.fill(static_cast<float>(rank + 1));
        group.reduce(x.buffer(), root, ReduceOp::kSum, kTimeout);
        x.require_all(rank == root ? sum : static_cast<float>(rank + 1), "reduce");
    }
}

void schedules(SharedMemoryGroup& group, const Programs& programs, int64_t count, bool in_arena, int rounds) {
    Floats x(group, count, in_arena);
    const auto sum = static_cast<float>(group.size() * (group.size() + 1) / 2);
    for (const auto& [name, of_ranks] : programs) {
        for (int round = 0; round < rounds; ++round) {
            x.fill(static_cast<float>(group.rank() + 1));
            group.run(of_ranks[static_cast<size_t>(group.rank())], x.buffer(), ReduceOp::kSum, kTimeout);
            x.require_all(sum, "a schedule");
        }
    }
}

// Whoever waits most gets most, all elements are somebody's, and without slacks, or with small ones, all get the same.
void shares(int size) {
    auto slacks = [&](double first, double others) {
        std::vector<double> out(static_cast<size_t>(size), others);
        out[0] = first;
        return out;
    };
    constexpr int64_t kBytes = 40'000'000;
    for (int64_t count : {int64_t{1}, int64_t{1000}, int64_t{1'000'003}}) {
        for (double first : {-1.0, 0.0, 1e-5, 3e-3, 1.0}) {
            for (double others : {0.0, 1e-3, 2.0}) {
                const Shares found(slacks(first, others), kBytes);
                int64_t end = 0;
                for (int p = 0; p < size; ++p) {
                    const Range range = found.of(count, p);
                    require(range.begin == end && range.end >= end, "shares lie side by side");
                    end = range.end;
                }
                require(end == count, "shares are all there is");
            }
        }
    }
    auto of_first = [&](double first, double others) {
        return Shares(slacks(first, others), kBytes).of(1'000'000, 0).size();
    };
    const int64_t equal = of_first(-1.0, 0.0);
    require(of_first(1e-5, 0.0) == equal, "small slacks");
    require(of_first(0.0, 1e-3) < equal, "a rank that the others wait for");
    require(of_first(0.0, 1.0) == 0, "a rank that the others wait for all the time");
    require(of_first(1e-3, 0.0) > equal && of_first(1.0, 0.0) == 1'000'000, "a rank that waits");
}

// One rank gives up at some moment while all work; the others hear of it, and so does whoever asks for memory
// meanwhile.
void giving_up(int size, unsigned seed) {
    Groups groups = make_groups(size, 0);
    const int leaver = static_cast<int>(seed) % size;
    std::thread closer([&] {
        usleep(static_cast<useconds_t>(seed * 7919 % 20000));
        groups[static_cast<size_t>(leaver)]->close("the test wants it so");
    });
    std::vector<std::unique_ptr<Floats>> arrays(static_cast<size_t>(size));
    std::atomic<int> failures{0};
    in_ranks(size, [&](int rank) {
        SharedMemoryGroup& group = *groups[static_cast<size_t>(rank)];
        try {
            arrays[static_cast<size_t>(rank)] = std::make_unique<Floats>(group, 100000, true);
            while (true) {
                group.all_reduce(arrays[static_cast<size_t>(rank)]->buffer(), ReduceOp::kMax, kTimeout);
                Floats more(group, 1000, true);
            }
        } catch (const CommFailure& failure) {
            bool right = rank == leaver || failure.peer == leaver || failure.operation == "empty";
            if (!right) fail(std::string("another rank is blamed: ") + failure.what());
            ++failures;
        }
    });
    closer.join();
    require(failures == size, "a rank did not hear of it");
    for (auto& group : groups) group->close("the end");
}

// Two threads of a rank, each with its group.
void two_groups(int size, int rounds) {
    Groups one = make_groups(size, 0), other = make_groups(size, 0);
    std::thread threads[2];
    for (int which : {0, 1}) {
        threads[which] = std::thread([&, which] {
            Groups& groups = which == 0 ? one : other;
            in_ranks(size, [&](int rank) { collectives(*groups[static_cast<size_t>(rank)], 5000, true, rounds); });
        });
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
    require(argc == 5, "driver PROGRAMS RANKS ROUNDS SEED");
    const int size = std::atoi(argv[2]), rounds = std::atoi(argv[3]);
    const auto seed = static_cast<unsigned>(std::atoi(argv[4]));
    const Programs programs = read_programs(argv[1], size);
    // Shortly before the clocks wrap around, so that they do.
    Groups groups = make_groups(size, UINT32_MAX - 100);
    in_ranks(size, [&](int rank) {
        SharedMemoryGroup& group = *groups[static_cast<size_t>(rank)];
        for (int memory : {0, 1, 2}) {  // all ranks' arrays in the arena, none, and some ranks'
            const bool in_arena = memory == 0 || (memory == 2 && rank % 2 == 0);
            for (int64_t count : {1, 3000, 30000, 300001}) {
                collectives(group, count, in_arena, count > 100000 ? 1 : rounds);
                uneven(group, count, in_arena, count > 100000 ? 1 : rounds);
            }
            if (memory == 2) continue;
            for (int64_t count : {7, 70001}) schedules(group, programs, count, in_arena, rounds);
        }
    });
    if (size > 1) shares(size);
    two_groups(size, rounds);
    messages(size, rounds, seed);
    for (unsigned i = 0; i < 5; ++i) giving_up(size, seed + i);
    AllPrograms all;
    for (const auto& [name, of_ranks] : programs) all.push_back(of_ranks);
    over_tcp(size, rounds, all, seed);
    std::puts("done");
    return 0;
}
