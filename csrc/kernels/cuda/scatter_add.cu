#include "kernels/scatter_add.h"

#include "device/launch.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/faults.h"
#include "kernels/cuda/grid.h"
#include "kernels/cuda/host.h"

namespace pycomm::cuda {
namespace {

constexpr uint32_t kNone = 0xffffffffu;

struct Findings {
    uint32_t first_bad;  // the lowest j whose index lies outside out
    uint32_t ascending;  // not 0: indices[j] < indices[j + 1] everywhere
};

struct Job {
    char* out;
    int64_t out_count;
    const char* indices;
    const char* values;
    int64_t count;
    Scale scale;
    Findings* findings;
    Fault* fault;
};

PYCOMM_DEVICE int64_t index_at(const Job& job, int64_t j) { return load_element<int32_t>(job.indices, j); }

PYCOMM_KERNEL inspect(Job job) {
    for (int64_t j = thread_of_grid(); j < job.count; j += threads_of_grid()) {
        int64_t index = index_at(job, j);
        if (index < 0 || index >= job.out_count) {
            device::atomic_min(&job.findings->first_bad, static_cast<uint32_t>(j));
        }
        if (j + 1 < job.count && index_at(job, j + 1) <= index) job.findings->ascending = 0;
    }
}

template <class Out, class Value>
PYCOMM_DEVICE void add_one(const Job& job, int64_t j, int64_t index, WiderOf<Out, Value> factor) {
    using Sum = WiderOf<Out, Value>;
    Sum term = static_cast<Sum>(widen(load_element<Value>(job.values, j))) * factor;
    Sum old = static_cast<Sum>(widen(load_element<Out>(job.out, index)));
    store_element(job.out, index, narrow<Out>(old + term));
}

// Any indices: each block owns a part of out and goes through all indices in order, so that repeated ones add up in
// the order of j. Within a round of one index per thread, equal ones take turns.
template <class Out, class Value>
PYCOMM_DEVICE void add_in_order(const Job& job, WiderOf<Out, Value> factor) {
    PYCOMM_SHARED(int64_t, round, device::kMaxThreads);
    PYCOMM_SHARED(uint32_t, num_turns, 1);
    int64_t begin = job.out_count * device::block_index() / device::num_blocks();
    int64_t end = job.out_count * (device::block_index() + 1) / device::num_blocks();
    int thread = device::thread_index();
    for (int64_t base = 0; base < job.count; base += device::num_threads()) {
        int64_t j = base + thread;
        int64_t index = j < job.count ? index_at(job, j) : -1;
        bool mine = index >= begin && index < end;
        round[thread] = mine ? index : -1;
        if (thread == 0) *num_turns = 0;
        device::block_barrier();
        uint32_t turn = 0;
        if (mine) {
            for (int earlier = 0; earlier < thread; ++earlier) turn += round[earlier] == index ? 1 : 0;
            device::atomic_max(num_turns, turn + 1);
        }
        device::block_barrier();
        uint32_t turns = *num_turns;
        for (uint32_t now = 0; now < turns; ++now) {
            if (mine && now == turn) add_one<Out, Value>(job, j, index, factor);
            device::block_barrier();
        }
    }
}

template <class Out, class Value>
PYCOMM_KERNEL add(Job job) {
    const auto factor = factor_of<WiderOf<Out, Value>>(job.scale);
    uint32_t bad = job.findings->first_bad;
    if (bad != kNone) {
        if (thread_of_grid() == 0) report(job.fault, Mistake::kScatterIndex, bad, index_at(job, bad), job.out_count);
        return;
    }
    if (job.findings->ascending != 0) {
        for (int64_t j = thread_of_grid(); j < job.count; j += threads_of_grid()) {
            add_one<Out, Value>(job, j, index_at(job, j), factor);
        }
    } else {
        add_in_order<Out, Value>(job, factor);
    }
}

}  // namespace

int64_t scatter_add_workspace_bytes() { return sizeof(Findings); }

void scatter_add(const Buffer& out, const int32_t* indices, const Buffer& values, Scale scale, Workspace& workspace,
                 Stream stream) {
    if (values.count == 0) return;
    workspace.table.clear();  // overwritten
    auto findings = reinterpret_cast<Findings*>(workspace.memory);
    device::fill_bytes(findings, 0xff, sizeof(Findings), stream);
    Job job{out.bytes(), out.count, reinterpret_cast<const char*>(indices), values.bytes(), values.count, scale,
            findings,    fault()};
    constexpr int64_t kMostBlocks = 512;  // each of them reads all indices where they do not ascend
    int64_t blocks = blocks_for(values.count, device::threads_per_block() * int64_t{2});
    if (blocks > kMostBlocks) blocks = kMostBlocks;
    device::launch<inspect>("scatter_add", blocks, stream, job);
    with_float_type(out.dtype, [&](auto* out_type) {
        with_float_type(values.dtype, [&](auto* value_type) {
            using Out = std::remove_pointer_t<decltype(out_type)>;
            using Value = std::remove_pointer_t<decltype(value_type)>;
            device::launch<add<Out, Value>>("scatter_add", blocks, stream, job);
        });
    });
}

}  // namespace pycomm::cuda
