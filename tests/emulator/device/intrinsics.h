// The host's version of csrc/device/intrinsics.h: see there for what each name means, and emulator.h for how it works.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "base/half.h"
#include "emulator.h"

#define PYCOMM_KERNEL static void
#define PYCOMM_KERNEL_OF(blocks) static void
#define PYCOMM_DEVICE static inline
#define PYCOMM_MEMBER inline
#define PYCOMM_HOST_DEVICE static inline
#define PYCOMM_SHARED(type, name, count) \
    type* const name = static_cast<type*>(emulator::shared(__FILE__, __LINE__, sizeof(type) * (count)))

namespace pycomm::device {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr int kMaxThreads = 256;

PYCOMM_DEVICE int thread_index() { return emulator::thread_index(); }
PYCOMM_DEVICE int num_threads() { return emulator::num_threads(); }
PYCOMM_DEVICE int block_index() { return emulator::block_index(); }
PYCOMM_DEVICE int num_blocks() { return emulator::num_blocks(); }

PYCOMM_DEVICE void block_barrier() { emulator::block_barrier(); }

PYCOMM_DEVICE unsigned ballot(bool predicate) {
    const uint64_t* lanes = emulator::exchange(predicate ? 1 : 0);
    unsigned out = 0;
    for (unsigned lane = 0; lane < 32; ++lane) out |= static_cast<unsigned>(lanes[lane]) << lane;
    return out;
}
template <class T>
PYCOMM_DEVICE T shuffle(T value, int lane) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    const uint64_t* lanes = emulator::exchange(bits);
    std::memcpy(&value, &lanes[lane & 31], sizeof(T));
    return value;
}
template <class T>
PYCOMM_DEVICE T shuffle_up(T value, int delta) {
    int lane = emulator::thread_index() % 32;
    return shuffle(value, lane >= delta ? lane - delta : lane);
}

PYCOMM_DEVICE uint32_t atomic_add(uint32_t* where, uint32_t value) {
    emulator::maybe_yield();
    uint32_t old = *where;
    *where = old + value;
    return old;
}
PYCOMM_DEVICE uint32_t atomic_max(uint32_t* where, uint32_t value) {
    emulator::maybe_yield();
    uint32_t old = *where;
    *where = value > old ? value : old;
    return old;
}
PYCOMM_DEVICE uint32_t atomic_min(uint32_t* where, uint32_t value) {
    emulator::maybe_yield();
    uint32_t old = *where;
    *where = value < old ? value : old;
    return old;
}
PYCOMM_DEVICE uint32_t atomic_read(const uint32_t* where) { return *static_cast<const volatile uint32_t*>(where); }
PYCOMM_DEVICE void device_fence() {}
PYCOMM_DEVICE void system_fence() {}
PYCOMM_DEVICE void pause() { emulator::pause(); }

PYCOMM_DEVICE int count_ones(uint32_t x) { return std::popcount(x); }
PYCOMM_DEVICE int lowest_one(uint32_t x) { return x == 0 ? -1 : std::countr_zero(x); }
PYCOMM_DEVICE int highest_one(uint32_t x) { return 31 - std::countl_zero(x); }
PYCOMM_DEVICE uint32_t bits_of(float x) { return float_bits(x); }
PYCOMM_DEVICE uint64_t bits_of(double x) { return std::bit_cast<uint64_t>(x); }
PYCOMM_DEVICE float float_of(uint32_t bits) { return bits_float(bits); }
PYCOMM_DEVICE double double_of(uint64_t bits) { return std::bit_cast<double>(bits); }

PYCOMM_DEVICE float to_float(F16 x) { return pycomm::to_float(x); }
PYCOMM_DEVICE float to_float(BF16 x) { return pycomm::to_float(x); }
PYCOMM_DEVICE F16 to_f16(float x) { return pycomm::to_f16(x); }
PYCOMM_DEVICE BF16 to_bf16(float x) { return pycomm::to_bf16(x); }

}  // namespace pycomm::device
