#include "transport/shared_memory/shares.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace pycomm {
namespace {

// Bytes that a rank reads and writes per second. A rough figure will do: half of it only makes shares less unequal.
constexpr double kBytesPerSecond = 12e9;
constexpr double kLeastDifference = 0.05;  // as a fraction of a share; below it nothing is gained

// Divides `work` seconds so that work minus slack is the same for all ranks; one with too little slack gets no work.
std::vector<double> levelled(const std::vector<double>& slacks, double work) {
    std::vector<double> sorted = slacks;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    double sum = 0.0, level = 0.0;
    for (size_t i = 0; i < sorted.size(); ++i) {  // the ranks with the most slack, as many as get work
        sum += sorted[i];
        const double next = (work - sum) / static_cast<double>(i + 1);
        if (next + sorted[i] < 0.0) break;
        level = next;
    }
    std::vector<double> out;
    for (double slack : slacks) out.push_back(std::max(0.0, level + slack));
    return out;
}

}  // namespace

Shares::Shares(const std::vector<double>& slacks, int64_t num_bytes) : size_(static_cast<int>(slacks.size())) {
    const auto [least, most] = std::minmax_element(slacks.begin(), slacks.end());
    if (size_ < 2 || *least < 0.0 || num_bytes < kUnequalBytes) return;
    // For each element, all ranks' inputs are read and all ranks' results written.
    const double work = 2.0 * size_ * static_cast<double>(num_bytes) / kBytesPerSecond;
    if (*most - *least < kLeastDifference * work / size_) return;
    borders_.push_back(0.0);
    for (double each : levelled(slacks, work)) borders_.push_back(borders_.back() + each / work);
}

Range Shares::of(int64_t count, int p) const {
    if (borders_.empty()) return piece_of(count, p, size_, kPartAlign);
    auto border = [&](int k) {
        if (k == size_) return count;
        const double place = borders_[static_cast<size_t>(k)] * static_cast<double>(count) / kPartAlign;
        return std::min(count, static_cast<int64_t>(std::llround(place)) * kPartAlign);
    };
    return {border(p), border(p + 1)};
}

}  // namespace pycomm
