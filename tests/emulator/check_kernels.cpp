// Runs the kernels that have barriers in the emulator, with many seeds, and compares them with a few plain lines.
// Exits with 1, saying why, at the first difference. tests/emulator/test_mutations.py breaks the kernels and expects
// so.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "emulator.h"
#include "kernels/chunks.h"
#include "kernels/entries.h"
#include "kernels/norms.h"
#include "kernels/quantize.h"
#include "kernels/scatter_add.h"
#include "kernels/sparsify.h"
#include "kernels/step.h"
#include "kernels/topk.h"

namespace {

using pycomm::Buffer;
using pycomm::DType;

std::vector<char> scratch(int64_t num_bytes) { return std::vector<char>(static_cast<size_t>(num_bytes) + 256, '\xa5'); }

pycomm::cuda::Workspace workspace_in(std::vector<char>& memory) {
    auto address = reinterpret_cast<uintptr_t>(memory.data());
    return {memory.data() + (256 - address % 256) % 256, static_cast<int64_t>(memory.size()) - 256, {}};
}

[[noreturn]] void differ(const std::string& what) {
    std::printf("%s differs\n", what.c_str());
    std::exit(1);
}

// The k elements of x[begin, end) of largest magnitude, in order; *kth becomes the magnitude of the last one.
std::vector<int32_t> largest(const std::vector<float>& x, int32_t begin, int32_t end, int64_t k, float* kth) {
    std::vector<int32_t> found(static_cast<size_t>(end - begin));
    std::iota(found.begin(), found.end(), begin);
    auto larger = [&](int32_t a, int32_t b) {
        float left = std::fabs(x[static_cast<size_t>(a)]), right = std::fabs(x[static_cast<size_t>(b)]);
        return left > right || (left == right && a < b);
    };
    std::sort(found.begin(), found.end(), larger);
    *kth = std::fabs(x[static_cast<size_t>(found[static_cast<size_t>(k) - 1])]);
    found.resize(static_cast<size_t>(k));
    std::sort(found.begin(), found.end());
    return found;
}

void check_topk(std::vector<float>& x, int64_t k, float earlier, const std::string& what) {
    float kth = 0.0f;
    std::vector<int32_t> wanted = largest(x, 0, static_cast<int32_t>(x.size()), k, &kth);
    std::vector<float> values(static_cast<size_t>(k));
    std::vector<int32_t> indices(static_cast<size_t>(k));
    Buffer source{x.data(), static_cast<int64_t>(x.size()), DType::kF32, 0};
    Buffer top{values.data(), k, DType::kF32, 0};
    std::vector<char> memory = scratch(pycomm::cuda::topk_workspace_bytes(source, k));
    pycomm::cuda::Workspace workspace = workspace_in(memory);
    pycomm::cuda::topk(source, k, top, indices.data(), &earlier, workspace, nullptr);
    if (indices != wanted || earlier != kth) differ(what);
    for (size_t j = 0; j < wanted.size(); ++j) {
        if (values[j] != x[static_cast<size_t>(wanted[j])]) differ(what + " (values)");
    }
}

void check_topks(std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<float> x(70'000);
    for (float& value : x) value = normal(random);
    check_topk(x, 60, 0.0f, "topk from a sample");
    check_topk(x, 2000, 2.2f, "topk from an earlier threshold");
    check_topk(x, 50, 1e30f, "topk from a useless threshold");
    std::vector<float> sparse(x.size());
    for (size_t i = 0; i < x.size(); i += 70) sparse[i] = x[i];
    check_topk(sparse, 60, 0.0f, "topk of zeros for the most part");
    for (float& value : x) value = std::round(value * 2.0f);
    check_topk(x, 5000, 0.0f, "topk with ties");
    x.resize(9000);
    check_topk(x, 3000, 0.0f, "topk of few elements");
}

void check_scatter_add(std::mt19937& random, bool ascending) {
    std::vector<float> out(500), wanted, values(900);
    std::vector<int32_t> indices(values.size());
    for (float& value : out) value = static_cast<float>(random()) * 1e-9f;
    for (float& value : values) value = static_cast<float>(random()) * 1e-9f;
    for (int32_t& index : indices) index = static_cast<int32_t>(random() % 25);
    if (ascending) {
        indices.resize(300);
        std::iota(indices.begin(), indices.end(), 7);
    }
    wanted = out;
    for (size_t j = 0; j < indices.size(); ++j) wanted[static_cast<size_t>(indices[j])] += values[j];
    auto count = static_cast<int64_t>(indices.size());
    std::vector<char> memory = scratch(pycomm::cuda::scatter_add_workspace_bytes());
    pycomm::cuda::Workspace workspace = workspace_in(memory);
    pycomm::cuda::scatter_add({out.data(), 500, DType::kF32, 0}, indices.data(), {values.data(), count, DType::kF32, 0},
                              {}, workspace, nullptr);
    if (out != wanted) differ("scatter_add");
}

void check_sparsify(std::mt19937& random, float earlier, const std::string& what) {
    const std::vector<int64_t> sizes = {3000, 3, 9000}, counts = {40, 1, 100};
    std::normal_distribution<float> normal;
    std::vector<float> grads(12'003), acc(grads.size()), values(141), wanted_thresholds;
    for (float& value : grads) value = normal(random);
    pycomm::Accumulation job;
    std::vector<int32_t> wanted, indices(values.size());
    for (int32_t begin = 0; size_t j : {0, 1, 2}) {
        auto end = begin + static_cast<int32_t>(sizes[j]);
        job.grads.push_back({grads.data() + begin, sizes[j], DType::kF32, 0});
        float kth = 0.0f;
        for (int32_t index : largest(grads, begin, end, counts[j], &kth)) wanted.push_back(index);
        wanted_thresholds.push_back(kth);
        begin = end;
    }
    job.acc = {acc.data(), 12'003, DType::kF32, 0};
    std::vector<float> thresholds(3, earlier);
    bool missed[3], finite[3];
    pycomm::Selection selection{
        counts, {values.data(), 141, DType::kF32, 0}, indices.data(), thresholds.data(), missed};
    std::vector<char> memory = scratch(pycomm::cuda::sparsify_workspace_bytes(job, selection));
    pycomm::cuda::Workspace workspace = workspace_in(memory);
    pycomm::cuda::sparsify(job, {}, selection, finite, workspace, nullptr);
    if (acc != grads || indices != wanted || thresholds != wanted_thresholds) differ(what);
    for (size_t m = 0; m < wanted.size(); ++m) {
        if (values[m] != acc[static_cast<size_t>(wanted[m])]) differ(what + " (values)");
    }
}

void check_quantize(std::mt19937& random) {
    std::vector<float> x(9000), units(3);
    std::vector<uint8_t> codes(x.size());
    for (float& value : x) value = static_cast<float>(random()) * 1e-9f - 2.0f;
    pycomm::Quantization how{4096, 127, 8, pycomm::Norm::kMax};
    pycomm::cuda::quantize({x.data(), 9000, DType::kF32, 0}, how, nullptr, units.data(), codes.data(), nullptr,
                           nullptr);
    for (size_t i = 0; i < x.size(); ++i) {
        float most = 0.0f;
        for (size_t j = i / 4096 * 4096; i % 4096 == 0 && j < x.size() && j < i + 4096; ++j) {
            most = std::max(most, std::fabs(x[j]));
        }
        if (i % 4096 == 0 && units[i / 4096] != most * (1.0f / 127.0f)) differ("quantize (units)");
        float error = x[i] - static_cast<float>(static_cast<int8_t>(codes[i])) * units[i / 4096];
        if (std::fabs(error) > 0.501f * units[i / 4096]) differ("quantize (codes)");
    }
}

// Of three ranks, packed, unpacked and added up.
void check_chunks(std::mt19937& random) {
    constexpr int32_t kSize = 4096, kCount = 9000;
    const pycomm::ChunkFormat format{40, kSize, 8};
    std::normal_distribution<float> normal;
    std::vector<float> x(kCount), wanted(kCount), out(kCount, 7.0f);
    std::vector<std::vector<uint32_t>> words(3);
    std::vector<const uint32_t*> messages;
    auto upper_half = [](float value) { return std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0xffff0000u); };
    for (std::vector<uint32_t>& of_rank : words) {
        for (float& value : x) value = normal(random);
        of_rank.resize(static_cast<size_t>(pycomm::ChunkLayouts(format, kCount).num_words()));
        messages.push_back(of_rank.data());
        pycomm::cuda::pack_chunks({x.data(), kCount, DType::kF32, 0}, format, of_rank.data(), nullptr, 1.0f, nullptr);
        for (int32_t begin = 0; begin < kCount; begin += kSize) {
            float low = 0.0f, high = 0.0f;
            int32_t end = std::min(begin + kSize, kCount);
            largest(x, begin, end, 1, &high);
            std::vector<int32_t> entries = largest(x, begin, end, format.k, &low);
            auto levels = pycomm::ChunkLevels::of(upper_half(low), upper_half(high), format.bits);
            for (int32_t index : entries) {
                auto i = static_cast<size_t>(index);
                wanted[i] += std::copysign(magnitude_of(levels, level_of(levels, std::fabs(x[i]))), x[i]);
            }
        }
    }
    std::vector<char> memory = scratch(pycomm::cuda::unpack_chunks_workspace_bytes(messages.size()));
    pycomm::cuda::Workspace workspace = workspace_in(memory);
    pycomm::cuda::unpack_chunks(messages, format, {out.data(), kCount, DType::kF32, 0}, {0.5, nullptr, nullptr},
                                workspace, nullptr);
    for (float& value : wanted) value *= 0.5f;
    if (out != wanted) differ("chunks");
}

// Of whole numbers, whose sums are the same in any order.
void check_squares(std::mt19937& random) {
    std::vector<float> numbers(16'056), moments(2 * numbers.size(), 0.0f);
    for (float& number : numbers) number = static_cast<float>(random() % 9);
    pycomm::Step job;
    job.rule = pycomm::Rule::kLambMoments;
    job.coefficients.one_minus_beta1 = job.coefficients.eps = 1.0;  // the direction is the gradient
    std::vector<double> wanted, twice;
    for (int64_t begin = 0; int64_t size : {600, 700, 3, 0, 9000, 513, 40, 1040, 1040, 1040, 1040, 1040}) {
        float* from = numbers.data() + begin;
        job.weights.push_back({from, size, DType::kF32, 0});
        for (int s : {0, 1}) job.states[s].push_back({moments.data() + 2 * begin + s * size, size, DType::kF32, 0});
        wanted.push_back(std::inner_product(from, from + size, from, 0.0));
        twice.insert(twice.end(), 2, wanted.back());
        begin += size;
    }
    job.grads = job.weights;
    std::vector<double> norms(wanted.size()), squares(twice.size());
    job.squares = squares.data();
    std::vector<char> memory = scratch(pycomm::cuda::step_workspace_bytes(job));  // more than norms want
    pycomm::cuda::Workspace workspace = workspace_in(memory);
    pycomm::cuda::norms(job.weights, norms.data(), workspace, nullptr);
    if (norms != wanted) differ("norms");
    pycomm::cuda::step(job, {}, workspace, nullptr);
    if (squares != twice) differ("step (squares)");
}

// Messages of three ranks, as they are packed, unpacked and added up. `bad`: a rank whose sums are not finite, or -1.
void check_entries(std::mt19937& random, int bad) {
    constexpr int kRanks = 3;
    constexpr int64_t kLimit = 9000, kCount = 300, kParams = 40;
    const pycomm::EntryLayout layout(kParams, 3, kCount, kLimit, DType::kF32, false);
    const pycomm::VerdictLayout at(layout, kRanks);
    std::vector<float> wanted(kLimit);
    std::vector<uint64_t> messages(static_cast<size_t>(kRanks * layout.num_bytes / 8));
    std::vector<uint64_t> answers(static_cast<size_t>(at.num_bytes / 8));
    auto bytes = reinterpret_cast<char*>(messages.data()), verdict = reinterpret_cast<char*>(answers.data());
    double largest = 0.0;
    std::vector<int32_t> places(kLimit), wanted_indices, indices(kRanks * kCount);
    std::iota(places.begin(), places.end(), 0);
    for (int rank = 0; rank < kRanks; ++rank) {
        std::vector<uint8_t> finite(kParams, 1);
        if (rank == bad) finite[17] = 0;
        std::shuffle(places.begin(), places.end(), random);
        std::vector<int32_t> mine(places.begin(), places.begin() + kCount);
        std::sort(mine.begin(), mine.end());
        wanted_indices.insert(wanted_indices.end(), mine.begin(), mine.end());
        std::vector<float> values, flat(kLimit, 7.0f);
        for (int32_t index : mine) {
            values.push_back(static_cast<float>(random() % 1000) - 500.0f);
            wanted[static_cast<size_t>(index)] += values.back();
        }
        largest += std::fabs(*std::max_element(values.begin(), values.end(),
                                               [](float a, float b) { return std::fabs(a) < std::fabs(b); }));
        pycomm::Taken taken;
        taken.values = reinterpret_cast<const char*>(values.data());
        taken.indices = mine.data();
        taken.flat = reinterpret_cast<char*>(flat.data());
        taken.finite = finite.data();
        pycomm::cuda::pack_entries(layout, taken, bytes + rank * layout.num_bytes, verdict, nullptr);
    }
    for (double most : {largest - 0.5, largest}) {  // the first time it does not fit
        std::vector<char> memory = scratch(pycomm::cuda::unpack_entries_workspace_bytes(layout, kRanks));
        pycomm::cuda::Workspace workspace = workspace_in(memory);
        pycomm::cuda::unpack_entries(layout, bytes, kRanks, {}, most, indices.data(), verdict, workspace, nullptr);
        if (indices != wanted_indices) differ("unpack_entries");
        if ((verdict[at.finite_at] != 0) != (most == largest && bad < 0)) differ("unpack_entries (finite)");
    }
    std::vector<float> out(kLimit, 5.0f);
    pycomm::Outcome outcome;
    outcome.out = {out.data(), kLimit, DType::kF32, 0};
    pycomm::cuda::add_entries(layout, bytes, kRanks, indices.data(), {}, outcome, verdict, nullptr);
    if (out != wanted) differ("add_entries");
}

// A norm of 12 is brought down to 3, one of 2 stays. Gradients of two sizes take turns: of short ones each is a warp's,
// so that some warps have much less to do than others.
void check_clipping(const std::vector<int64_t>& sizes, size_t number) {
    pycomm::Accumulation job;
    std::vector<float> grads, wanted;
    for (size_t j = 0; j < number; ++j) {
        grads.insert(grads.end(), static_cast<size_t>(sizes[j % 2]), 0.0f);
        wanted.resize(grads.size());
        grads.back() = j % 3 == 0 ? 12.0f : 2.0f;
        wanted.back() = j % 3 == 0 ? 3.0f : 2.0f;
    }
    float* next = grads.data();
    for (size_t j = 0; j < number; next += sizes[j++ % 2]) job.grads.push_back({next, sizes[j % 2], DType::kF32, 0});
    std::vector<float> acc(grads.size());
    job.acc = {acc.data(), static_cast<int64_t>(acc.size()), DType::kF32, 0};
    job.clip = 3.0;
    std::vector<uint8_t> finite(number);
    std::vector<char> memory = scratch(pycomm::cuda::accumulate_workspace_bytes(job));
    pycomm::cuda::Workspace workspace = workspace_in(memory);
    pycomm::cuda::accumulate(job, {}, reinterpret_cast<bool*>(finite.data()), workspace, nullptr);
    if (acc != wanted) differ("accumulate (clip)");
}

}  // namespace

int main(int argc, char** argv) {
    int rounds = argc > 1 ? std::atoi(argv[1]) : 6;
    std::mt19937 random(7);
    constexpr int kShapes[][2] = {{64, 3}, {128, 2}, {32, 4}};  // threads per block, blocks at once
    try {
        for (int round = 0; round < rounds; ++round) {
            const auto& [threads, blocks] = kShapes[round % 3];
            emulator::settings() = {static_cast<uint64_t>(100 * round + 1), threads, blocks};
            check_scatter_add(random, round % 2 == 0);
            check_topks(random);
            check_sparsify(random, 0.0f, "sparsify without thresholds");
            check_sparsify(random, 2.4f, "sparsify with thresholds");
            check_sparsify(random, 1.0f, "sparsify with useless thresholds");
            check_quantize(random);
            check_chunks(random);
            for (int times = 0; times < 3; ++times) check_squares(random);
            check_clipping({9216, 5000}, 5);
            check_clipping({1, 500}, 60);
            for (int bad : {-1, 1, 2}) check_entries(random, bad);
        }
    } catch (const std::exception& error) {
        std::printf("%s\n", error.what());
        return 1;
    }
    std::printf("all as it should be\n");
    return 0;
}
