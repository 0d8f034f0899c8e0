#include "transport/shared_memory/staging.h"

#include <algorithm>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pycomm {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kSizes[] = {1 << 20, 512 << 10, 256 << 10, 2 << 20, kMostSegmentBytes};
constexpr int kNumSizes = 5;
static_assert(kNumStagings == 2 * kNumSizes);
constexpr int64_t kLeastBytes =
    8 << 20;                    // of operations that tell: the ends of smaller ones weigh more than their middle
constexpr int kFirstTurns = 3;  // in which each is tried once
constexpr int kPeriod = 32;     // afterwards one of so many operations tries another one
// What was measured counts less and less: other processes come and go. The least counts, as noise only adds to it.
constexpr double kForgetting = 1.02;

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
    // Among the encodings that processors without it take for nothing.
    for (int64_t i = 0; i < num_bytes; i += kLine) asm volatile(".byte 0x0f, 0x1c, 0x07" : : "D"(to + i) : "memory");
#else
    (void)to, (void)num_bytes;
#endif
}

StagingChoice::StagingChoice() : num_tried_(has_demote() ? kNumStagings : kNumSizes) {
    seconds_per_byte_.fill(std::numeric_limits<double>::infinity());
}

int StagingChoice::next() const {
    if (count_ < int64_t{kFirstTurns} * num_tried_) return static_cast<int>(count_ % num_tried_);
    if (count_ % kPeriod == 0) return static_cast<int>(count_ / kPeriod % num_tried_);
    return best();
}

int StagingChoice::best() const {
    const auto first = seconds_per_byte_.begin();
    return static_cast<int>(std::min_element(first, first + num_tried_) - first);
}

void StagingChoice::observe(int index, int64_t num_bytes, double seconds) {
    if (num_bytes < kLeastBytes) return;
    double& known = seconds_per_byte_[static_cast<size_t>(index)];
    known = std::min(known * kForgetting, seconds / static_cast<double>(num_bytes));
    ++count_;
}

}  // namespace pycomm
