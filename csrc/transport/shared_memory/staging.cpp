#include "transport/shared_memory/staging.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pycomm {
namespace {

constexpr int64_t kSizes[] = {1 << 20, 512 << 10, 256 << 10, kMostSegmentBytes};
constexpr int kNumSizes = 4;
static_assert(kNumStagings == 2 * kNumSizes);
// Smaller operations are not measured: their beginning and end dominate.
constexpr int64_t kLeastBytes = 8 << 20;
constexpr int kPairs = 3;  // per trial; the other way must win all of them
constexpr double kWon = 0.98;
constexpr int kPause = 32;  // operations between trials, once each way has had a trial

bool has_demote() {
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (c >> 25 & 1) != 0;
#else
    return false;
#endif
}

}  // namespace

Staging staging_of(int index) { return {kSizes[index % kNumSizes], index >= kNumSizes}; }

void demote(const char* to, int64_t num_bytes) {
#if defined(__x86_64__)
    // Processors without CLDEMOTE execute this encoding as a no-op.
    for (int64_t i = 0; i < num_bytes; i += kCacheLine) {
        asm volatile(".byte 0x0f, 0x1c, 0x07" : : "D"(to + i) : "memory");
    }
#else
    (void)to, (void)num_bytes;
#endif
}

StagingChoice::StagingChoice() : num_ways_(has_demote() ? kNumStagings : kNumSizes) {}

void StagingChoice::observe(int64_t num_bytes, double seconds) {
    if (num_bytes < kLeastBytes) return;
    if (!is_trying()) {
        --pause_;
        return;
    }
    const double each = seconds / static_cast<double>(num_bytes);
    if (is_second_) {
        if (each < kWon * first_) ++wins_;
        ++pairs_;
    } else {
        first_ = each;
    }
    is_second_ = !is_second_;
    if (pairs_ == kPairs) end_trial();
}

void StagingChoice::end_trial() {
    if (wins_ == kPairs) used_ = tried_;
    pairs_ = wins_ = 0;
    if (++num_trials_ >= num_ways_ - 1) pause_ = kPause;
    do tried_ = (tried_ + 1) % num_ways_;
    while (tried_ == used_);
}

}  // namespace pycomm
