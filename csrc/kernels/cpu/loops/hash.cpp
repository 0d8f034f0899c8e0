#include "kernels/cpu/loops/members.h"
#include "kernels/random.h"

namespace pycomm::PYCOMM_ISA {
namespace {

// The compiler makes vectors of it.
template <class Bits>
uint64_t hash_of(const char* x, int64_t count, int64_t first) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
        Bits bits;
        __builtin_memcpy(&bits, x + i * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));
        sum += hash_term(bits, first + i);
    }
    return sum;
}

}  // namespace

uint64_t hash(const void* x, int64_t itemsize, int64_t count, int64_t first) {
    auto bytes = static_cast<const char*>(x);
    switch (itemsize) {
        case 1:
            return hash_of<uint8_t>(bytes, count, first);
        case 2:
            return hash_of<uint16_t>(bytes, count, first);
        case 4:
            return hash_of<uint32_t>(bytes, count, first);
        default:
            return hash_of<uint64_t>(bytes, count, first);
    }
}

}  // namespace pycomm::PYCOMM_ISA
