// One kernel, whose blocks all run at once and are one team:
//
//   guess    a threshold: 0.9 of an earlier one, or from the histogram of a sample
//   mark     one read of x: a bit per element that reaches the guess, and a histogram of these, the candidates
//   list     the candidates, in order: prefix sums over the blocks' counts say where each block's go
//   decide   one block finds the k-th key among the few candidates in its bin of the histogram
//   write    the elements above the k-th key, and as many ties with it as belong to the k, in order
//
// This takes three meetings of the blocks with an earlier threshold, four without. If too few or too many elements are
// marked, the next guess is tried, and in the end none. Then, and if too many keys share a bin, the k-th key is found
// by radix, 12 bits per meeting, among the candidates or in x itself. Marking sets bits instead of writing positions:
// blocks need not agree on places in a list yet, and nothing can overflow.
#include "kernels/topk.h"

#include <algorithm>

#include "device/launch.h"
#include "kernels/cuda/host.h"
#include "kernels/cuda/topk_select.h"

namespace pycomm::cuda {
namespace {

using namespace selection;

template <class T>
PYCOMM_KERNEL_OF(2)
topk_kernel(Job<Keys<T>> job) {
    using K = Keys<T>;
    using Key = typename K::Key;
    PYCOMM_SHARED(uint32_t, counts, kBins);
    Team team{&job.record->meeting, device::block_index(), device::num_blocks()};
    Candidates<K> found = {};
    float earlier = job.threshold == nullptr ? 0.0f : *job.threshold;
    bool warm = earlier > 0.0f && is_finite(earlier);
    for (int guess = warm ? 0 : 1; guess < 2 && !found.listed && job.sample_rank != 0; ++guess) {
        Key lowest = guess == 0 ? K::near(kThresholdHint * earlier) : sample(job, counts, team);
        found = list_from(job, Floor<K>{lowest > 0 ? lowest : Key{1}}, counts, team);
    }
    select(job, found, counts, team);
}

// Layout of the workspace.
struct TopkLayout {
    uint32_t sample_rank, capacity;
    int64_t slots, edges, words, keys, indices, num_bytes;

    TopkLayout(const Buffer& x, int64_t k) : sample_rank(sample_rank_of(x.count, k)), capacity(0) {
        if (sample_rank != 0) capacity = static_cast<uint32_t>(std::min(x.count, 4 * k + x.count / 64));
        int64_t tiles = capacity == 0 ? 0 : x.count / View<Keys<float>>::kTileElems + 2;
        int64_t key_bytes = x.dtype == DType::kF64 ? 8 : 4;
        slots = round_up(sizeof(Record));
        edges = slots + round_up(int64_t{3} * kMaxBlocks * 4);
        words = edges + round_up(kMostEdges * int64_t{sizeof(Edge<uint64_t>)});
        keys = words + round_up(tiles * View<Keys<float>>::kTileWords * 4);
        indices = keys + round_up(capacity * key_bytes);
        num_bytes = indices + round_up(capacity * int64_t{4});
    }
};

template <class T>
void launch_topk(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices, float* threshold,
                 Workspace& workspace, Stream stream) {
    using K = Keys<T>;
    TopkLayout layout(x, k);
    char* memory = workspace.memory;
    auto slots = reinterpret_cast<uint32_t*>(memory + layout.slots);
    Job<K> job{x.bytes(),
               static_cast<uint32_t>(x.count),
               static_cast<uint32_t>(k),
               threshold,
               values.bytes(),
               reinterpret_cast<char*>(indices),
               nullptr,
               0,
               layout.sample_rank,
               layout.capacity,
               reinterpret_cast<Record*>(memory),
               slots,
               slots + kMaxBlocks,
               slots + 2 * kMaxBlocks,
               reinterpret_cast<Edge<typename K::Key>*>(memory + layout.edges),
               reinterpret_cast<uint32_t*>(memory + layout.words),
               reinterpret_cast<typename K::Key*>(memory + layout.keys),
               reinterpret_cast<uint32_t*>(memory + layout.indices)};
    int64_t resident = device::max_resident_blocks<topk_kernel<T>>("topk");
    int64_t blocks = blocks_for_selection(x.count, x.device, resident, 2);
    device::fill_bytes(job.record, 0, sizeof(Record), stream);
    device::launch_together<topk_kernel<T>>("topk", blocks, stream, job);
}

}  // namespace

int64_t topk_workspace_bytes(const Buffer& x, int64_t k) { return TopkLayout(x, k).num_bytes; }

void topk(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices, float* threshold, Workspace& workspace,
          Stream stream) {
    workspace.table.clear();  // overwritten
    with_float_type(x.dtype, [&](auto* type) {
        launch_topk<std::remove_pointer_t<decltype(type)>>(x, k, values, indices, threshold, workspace, stream);
    });
}

}  // namespace pycomm::cuda
