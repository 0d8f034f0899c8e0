#include "kernels/low_rank.h"

#include <cmath>

#include "device/launch.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/sums.h"

namespace pycomm::cuda {
namespace {

// Columns of doubles, `n` long, of which every thread of the block reads and writes the same elements throughout: but
// for the sums, threads need not wait for each other.
struct Columns {
    double* memory;
    int64_t n;

    PYCOMM_MEMBER double* operator[](int64_t k) const { return memory + k * n; }

    template <class Use>
    PYCOMM_MEMBER void for_mine(Use&& use) const {
        for (int64_t i = device::thread_index(); i < n; i += device::num_threads()) use(i);
    }
    PYCOMM_MEMBER double product(const double* x, const double* y) const {
        Sums<1> sum = {};
        for_mine([&](int64_t i) { sum.values[0] += x[i] * y[i]; });
        return sum_block(sum).values[0];
    }
    // As on the CPU.
    PYCOMM_MEMBER double project_out(int64_t k) const {
        double* const x = (*this)[k];
        for (int pass = 0; pass < 2; ++pass) {
            for (int64_t l = 0; l < k; ++l) {
                const double* const y = (*this)[l];
                const double along = product(y, x);
                for_mine([&](int64_t i) { x[i] -= along * y[i]; });
            }
        }
        return std::sqrt(product(x, x));
    }
    PYCOMM_MEMBER void orthogonalize(int64_t rank) const {
        for (int64_t k = 0; k < rank; ++k) {
            double* const x = (*this)[k];
            const double before = std::sqrt(product(x, x));
            if (before > 0.0) for_mine([&](int64_t i) { x[i] /= before; });
            double length = project_out(k);
            double shortest = kShortestColumn;
            for (int64_t unit = k; length < shortest; unit = (unit + 1) % n) {
                for_mine([&](int64_t i) { x[i] = i == unit ? 1.0 : 0.0; });
                length = project_out(k);
                shortest = 0.5 / std::sqrt(static_cast<double>(n));
            }
            for_mine([&](int64_t i) { x[i] /= length; });
        }
    }
};

// A block for each matrix, which is two arrays of the table: as many elements as it has rows, and the others.
PYCOMM_KERNEL orthogonalize_kernel(Table table, double* memory) {
    const Entry* const entry = table.entries + 2 * device::block_index();
    const int64_t n = entry[1].begin - entry[0].begin, rank = (entry[2].begin - entry[0].begin) / n;
    const Columns columns{memory + entry[0].begin, n};
    auto with = [&](auto* p) {
        columns.for_mine([&](int64_t i) {
            for (int64_t k = 0; k < rank; ++k) columns[k][i] = p[i * rank + k];
        });
        columns.orthogonalize(rank);
        columns.for_mine([&](int64_t i) {
            for (int64_t k = 0; k < rank; ++k) {
                p[i * rank + k] = static_cast<std::remove_pointer_t<decltype(p)>>(columns[k][i]);
            }
        });
    };
    entry->dtype == DType::kF64 ? with(reinterpret_cast<double*>(entry->data))
                                : with(reinterpret_cast<float*>(entry->data));
}

}  // namespace

int64_t orthogonalize_workspace_bytes(const std::vector<LowRankShape>& shapes) {
    int64_t count = 0;
    for (const LowRankShape& shape : shapes) count += shape.rows * shape.rank;
    return table_bytes(2 * shapes.size()) + count * static_cast<int64_t>(sizeof(double));
}

void orthogonalize(const Buffer& p, const std::vector<LowRankShape>& shapes, Workspace& workspace, Stream stream) {
    if (shapes.empty()) return;
    std::vector<Buffer> parts;
    char* next = p.bytes();
    for (const LowRankShape& shape : shapes) {
        for (int64_t count : {shape.rows, shape.rows * (shape.rank - 1)}) {
            parts.push_back({next, count, p.dtype, p.device});
            next += parts.back().num_bytes();
        }
    }
    const Table table = upload(parts, workspace, stream);
    auto memory = reinterpret_cast<double*>(workspace.memory + table_bytes(parts.size()));
    device::launch<orthogonalize_kernel>("orthogonalize", static_cast<int64_t>(shapes.size()), stream, table, memory);
}

}  // namespace pycomm::cuda
