#include <atomic>
#include <cstring>

#if defined(PYCOMM_X86)
#include <cpuid.h>
#endif

#include "kernels/cpu/loops/loops.h"

namespace pycomm {

namespace baseline {
extern const Loops kLoops;
}
#if defined(PYCOMM_X86)
namespace avx2 {
extern const Loops kLoops;
}
namespace avx512 {
extern const Loops kLoops;
}
#endif

namespace {

#if defined(PYCOMM_X86)
// clang's __builtin_cpu_supports does not know the name before clang 17.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

// Widest first; only those this processor can run.
const Loops* available(const char* name) {
    auto wanted = [&](const Loops& candidate) { return name == nullptr || std::strcmp(name, candidate.name) == 0; };
#if defined(PYCOMM_X86)
    __builtin_cpu_init();
    bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && wanted(avx512::kLoops)) return &avx512::kLoops;
    if (has_avx2 && wanted(avx2::kLoops)) return &avx2::kLoops;
#endif
    return wanted(baseline::kLoops) ? &baseline::kLoops : nullptr;
}

std::atomic<const Loops*> selected{nullptr};

}  // namespace

const Loops& loops() {
    const Loops* current = selected.load(std::memory_order_relaxed);
    if (current == nullptr) {
        current = available(nullptr);
        selected.store(current, std::memory_order_relaxed);
    }
    return *current;
}

bool select_loops(const char* name) {
    const Loops* found = available(name);
    if (found == nullptr) return false;
    selected.store(found);
    return true;
}

}  // namespace pycomm
