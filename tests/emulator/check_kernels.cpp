// Runs the kernels that have barriers in the emulator, with many seeds, and compares them with a few plain lines.
// Exits with 1, saying why, at the first difference. tests/emulator/test_mutations.py breaks the kernels and expects
// so.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "emulator.h"
#include "kernels/scatter_add.h"
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

void check_topk(std::vector<float>& x, int64_t k, float earlier, const std::string& what) {
    std::vector<int32_t> wanted(x.size());
    std::iota(wanted.begin(), wanted.end(), 0);
    auto larger = [&](int32_t a, int32_t b) {
        float left = std::fabs(x[static_cast<size_t>(a)]), right = std::fabs(x[static_cast<size_t>(b)]);
        return left > right || (left == right && a < b);
    };
    std::sort(wanted.begin(), wanted.end(), larger);
    float kth = std::fabs(x[static_cast<size_t>(wanted[static_cast<size_t>(k) - 1])]);
    wanted.resize(static_cast<size_t>(k));
    std::sort(wanted.begin(), wanted.end());
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
        }
    } catch (const std::exception& error) {
        std::printf("%s\n", error.what());
        return 1;
    }
    std::printf("all as it should be\n");
    return 0;
}
