#include <atomic>
#include <cstring>

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

// Widest first; only those this processor can run.
const Loops* available(const char* name) {
    auto wanted = [&](const Loops& candidate) { return name == nullptr || std::strcmp(name, candidate.name) == 0; };
#if defined(PYCOMM_X86)
    __builtin_cpu_init();
    bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
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
