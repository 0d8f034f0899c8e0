#include "emulator.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if defined(__x86_64__)
extern "C" void emulator_change_stack(void** save, void* next);
asm(R"(
.text
.type emulator_change_stack, @function
emulator_change_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
#endif

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr int kLanes = 32;

void fiber_main();

// Going on elsewhere. swapcontext() makes a system call each time, which takes longer than all the rest.
#if defined(__x86_64__)
using Context = void*;  // the stack pointer, below the registers that calls preserve

void change(Context& from, Context& to) { emulator_change_stack(&from, to); }

void prepare(Context& context, char* stack) {
    auto top = reinterpret_cast<void**>(stack + kStackBytes);
    top[-2] =
        reinterpret_cast<void*>(&fiber_main);  // what the first change returns to, on a stack aligned as by a call
    context = top - 8;
}
#else
using Context = ucontext_t;

void change(Context& from, Context& to) { swapcontext(&from, &to); }

void prepare(Context& context, char* stack) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, &fiber_main, 0);
}
#endif

struct Warp {
    uint64_t values[2][kLanes];  // two exchanges may overlap: a lane leaves one while others still read it
    int arrived = 0;
};

struct Block {
    int index = 0;
    int arrived = 0;  // at the barrier
    int finished = 0;
    std::vector<Warp> warps;
    std::map<std::pair<std::string, int>, std::vector<char>> shared;
};

enum class State { kReady, kAtBarrier, kInExchange, kFinished };

struct Fiber {
    uint64_t urgency = 0;
    Context context;
    std::unique_ptr<char[]> stack;
    Block* block = nullptr;
    int thread = 0;
    int exchanges = 0;
    State state = State::kReady;
};

// Which of the ready fibers goes on. The last two starve some for as long as they can: a race that needs one thread to
// be far behind all others hardly ever happens by tossing a coin at each step.
enum class Order { kAnyone, kSomeThreadsFirst, kSomeWarpsFirst };

struct Machine {
    Context context;  // the scheduler's
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<std::pair<uint64_t, Fiber*>> ready;  // a heap by urgency, where that counts
    Order order = Order::kAnyone;
    uint64_t patience = 0;                        // less urgent than all others, and less each time
    std::vector<std::unique_ptr<char[]>> stacks;  // free ones, for the next fibers
    Fiber* running = nullptr;
    const std::function<void()>* kernel = nullptr;
    int threads = 0;
    int64_t blocks = 0;
    int64_t pauses = 0;  // since something last happened
    std::mt19937_64 random;
};

Machine machine;
int64_t launches = 0;

void to_scheduler() { change(machine.running->context, machine.context); }

void to_fiber(Fiber* fiber) {
    machine.running = fiber;
    change(machine.context, fiber->context);
}

constexpr uint64_t kLeastUrgent = uint64_t{1} << 62;
uint64_t any_urgency() { return kLeastUrgent + machine.random() % kLeastUrgent; }

void make_ready(Fiber* fiber) {
    fiber->state = State::kReady;
    machine.ready.emplace_back(fiber->urgency, fiber);
    if (machine.order != Order::kAnyone) std::push_heap(machine.ready.begin(), machine.ready.end());
}

Fiber* next_ready() {
    if (machine.order == Order::kAnyone) {
        std::swap(machine.ready[machine.random() % machine.ready.size()], machine.ready.back());
    } else {
        std::pop_heap(machine.ready.begin(), machine.ready.end());
    }
    Fiber* fiber = machine.ready.back().second;
    machine.ready.pop_back();
    // Now and then another one becomes the most, or the least, urgent.
    if (machine.random() % 256 == 0) fiber->urgency = any_urgency();
    return fiber;
}

void yield() {
    make_ready(machine.running);
    to_scheduler();
}

void fiber_main() {
    (*machine.kernel)();
    machine.running->state = State::kFinished;
    ++machine.running->block->finished;
    to_scheduler();
}

void start_block(Block* block, std::vector<std::unique_ptr<Fiber>>& fibers) {
    block->warps = std::vector<Warp>(static_cast<size_t>(machine.threads / kLanes));
    uint64_t of_warp = 0;
    for (int thread = 0; thread < machine.threads; ++thread) {
        if (thread % kLanes == 0) of_warp = any_urgency();
        auto fiber = std::make_unique<Fiber>();
        if (machine.stacks.empty()) machine.stacks.emplace_back(new char[kStackBytes]);
        fiber->stack = std::move(machine.stacks.back());
        machine.stacks.pop_back();
        fiber->block = block;
        fiber->thread = thread;
        fiber->urgency = machine.order == Order::kSomeWarpsFirst ? of_warp + machine.random() % kLanes : any_urgency();
        prepare(fiber->context, fiber->stack.get());
        make_ready(fiber.get());
        fibers.push_back(std::move(fiber));
    }
}

[[noreturn]] void fail(const std::string& name, const std::string& problem) {
    // Fibers hold no resources besides what the kernel's own scopes do, and kernels have none.
    machine.ready.clear();
    machine.fibers.clear();
    throw std::logic_error("kernel " + name + ": " + problem);
}

}  // namespace

Settings& settings() {
    static Settings chosen;
    return chosen;
}

void run(const char* name, int64_t blocks, int threads, bool together, const std::function<void()>& kernel) {
    if (threads % kLanes != 0 || threads < kLanes) fail(name, "a block is a multiple of 32 threads");
    if (together && blocks > settings().resident_blocks) fail(name, "more blocks than can run at once");
    // One GPU for all threads of the process: ranks that are threads launch at the same time.
    static std::mutex busy;
    std::lock_guard<std::mutex> lock(busy);
    ++launches;
    machine.kernel = &kernel;
    machine.threads = threads;
    machine.blocks = blocks;
    machine.random.seed(settings().seed++);
    machine.patience = kLeastUrgent;
    machine.order = static_cast<Order>(machine.random() % 3);
    machine.ready.clear();
    machine.fibers.clear();
    machine.pauses = 0;
    std::vector<std::unique_ptr<Block>> alive;
    int64_t started = 0;
    while (true) {
        while (started < blocks && (together || static_cast<int>(alive.size()) < settings().resident_blocks)) {
            alive.push_back(std::make_unique<Block>());
            alive.back()->index = static_cast<int>(started++);
            start_block(alive.back().get(), machine.fibers);
        }
        if (machine.ready.empty()) break;
        Fiber* fiber = next_ready();
        to_fiber(fiber);
        if (machine.pauses > 100'000'000) fail(name, "blocks wait for each other for ever");
        if (fiber->state == State::kFinished && fiber->block->finished == threads) {
            Block* block = fiber->block;
            std::erase_if(machine.fibers, [&](const auto& one) {
                if (one->block != block) return false;
                machine.stacks.push_back(std::move(one->stack));
                return true;
            });
            std::erase_if(alive, [&](const auto& one) { return one.get() == block; });
        }
    }
    if (!alive.empty()) fail(name, "threads wait at a barrier, or in an exchange, that others never reach");
}

int64_t num_launches() { return launches; }

int thread_index() { return machine.running->thread; }
int num_threads() { return machine.threads; }
int block_index() { return machine.running->block->index; }
int num_blocks() { return static_cast<int>(machine.blocks); }

void block_barrier() {
    machine.pauses = 0;
    Block* block = machine.running->block;
    machine.running->state = State::kAtBarrier;
    if (++block->arrived == machine.threads) {
        block->arrived = 0;
        for (const auto& fiber : machine.fibers) {
            if (fiber->block == block) make_ready(fiber.get());
        }
    }
    to_scheduler();
}

const uint64_t* exchange(uint64_t mine) {
    Fiber* self = machine.running;
    int number = self->thread / kLanes;
    Warp& warp = self->block->warps[static_cast<size_t>(number)];
    uint64_t* values = warp.values[self->exchanges++ % 2];
    values[self->thread % kLanes] = mine;
    self->state = State::kInExchange;
    if (++warp.arrived == kLanes) {
        warp.arrived = 0;
        for (const auto& fiber : machine.fibers) {
            if (fiber->block == self->block && fiber->thread / kLanes == number) make_ready(fiber.get());
        }
    }
    to_scheduler();
    return values;
}

void maybe_yield() {
    if (machine.random() % 4 == 0) yield();
}

void pause() {
    ++machine.pauses;
    machine.running->urgency = --machine.patience;  // or it would wait for those who wait for it
    yield();
}

void* shared(const char* file, int line, size_t num_bytes) {
    auto& memory = machine.running->block->shared[{file, line}];
    if (memory.empty()) {
        memory.resize(num_bytes + 16);
        for (char& byte : memory) byte = static_cast<char>(machine.random());
    }
    auto address = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (16 - address % 16) % 16;
}

}  // namespace emulator
