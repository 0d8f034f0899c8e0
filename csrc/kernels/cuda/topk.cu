// One kernel, whose blocks all run at once and meet at grid barriers:
//
//   guess    a threshold: 0.98 of an earlier one, or from the histogram of a sample
//   mark     one read of x: a bit per element that reaches the threshold, a count per tile of 1,024
//   compact  prefix sums over the counts put the marked elements into one list, in order
//   select   the exact k-th key by radix, 12 bits per pass over the list; then the list's elements above it, and as
//            many of those equal to it as are wanted, are written in order, placed by prefix sums again
//
// Too few or too many marked: the next guess, at last none: select then works on x itself. Every block takes the same
// decisions, from the same counts. Bits instead of positions while marking: a place in a list would have to be agreed
// at once, and nothing can overflow.
#include "kernels/topk.h"

#include <algorithm>
#include <cmath>

#include "device/launch.h"
#include "kernels/cuda/host.h"
#include "kernels/cuda/topk_candidates.h"
#include "kernels/cuda/topk_select.h"

namespace pycomm::cuda {
namespace {

using namespace selection;

template <class T>
PYCOMM_KERNEL topk_kernel(Job<Keys<T>> job) {
    using K = Keys<T>;
    using Key = typename K::Key;
    PYCOMM_SHARED(uint32_t, counts, kBins);
    Grid grid{&job.shared->cleared.arrived};
    uint64_t before = 0, total = 0;
    uint32_t listed = 0;
    float earlier = job.threshold == nullptr ? 0.0f : *job.threshold;
    bool warm = earlier > 0.0f && is_finite(earlier);
    for (int guess = warm ? 0 : 1; guess < 2 && listed == 0 && job.sample_rank != 0; ++guess) {
        Key floor = guess == 0 ? K::near(0.98f * earlier) : sample(job, counts, grid);
        mark(job, floor > 0 ? floor : Key{1}, grid, &before, &total);
        if (total >= job.k && total <= job.capacity) listed = static_cast<uint32_t>(total);
    }
    if (listed != 0) compact(job, static_cast<uint32_t>(before), grid);
    select(job, counts, listed, grid);
}

// Layout of the workspace.
struct Layout {
    uint32_t sample_rank, capacity;
    int64_t words, tile_counts, keys, indices, num_bytes;

    Layout(const Buffer& x, int64_t k) : sample_rank(0), capacity(0) {
        constexpr int64_t kSmall = 1 << 16;  // sampling costs more than it saves
        constexpr double kSampled = double{kSampleLines} * kLineElems;
        double expected = kSampled * static_cast<double>(k) / static_cast<double>(x.count);
        // Four standard deviations of slack: one miss in 30,000 on independent data.
        double rank = expected + 4.0 * std::sqrt(expected) + 4.0;
        if (x.count >= kSmall && k <= x.count / 4 && rank < kSampled) {
            sample_rank = static_cast<uint32_t>(rank);
            capacity = static_cast<uint32_t>(std::min(x.count, 4 * k + x.count / 64));
        }
        int64_t tiles = capacity == 0 ? 0 : x.count / kTileElems + 2;
        int64_t key_bytes = x.dtype == DType::kF64 ? 8 : 4;
        words = round_up(sizeof(Shared));
        tile_counts = words + round_up(tiles * kWarpSize * 4);
        keys = tile_counts + round_up(tiles * 4);
        indices = keys + round_up(capacity * key_bytes);
        num_bytes = indices + round_up(capacity * int64_t{4});
    }

    static int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }
};

template <class T>
void launch_topk(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices, float* threshold,
                 Workspace& workspace, Stream stream) {
    using K = Keys<T>;
    Layout layout(x, k);
    char* memory = workspace.memory;
    auto shared = reinterpret_cast<Shared*>(memory);
    Job<K> job{x.bytes(),
               static_cast<uint32_t>(x.count),
               static_cast<uint32_t>(k),
               threshold,
               values.bytes(),
               reinterpret_cast<char*>(indices),
               layout.sample_rank,
               layout.capacity,
               shared,
               reinterpret_cast<uint32_t*>(memory + layout.words),
               reinterpret_cast<uint32_t*>(memory + layout.tile_counts),
               reinterpret_cast<typename K::Key*>(memory + layout.keys),
               reinterpret_cast<uint32_t*>(memory + layout.indices)};
    constexpr int64_t kElemsPerBlock = 8192;   // fewer are not worth a block more at every barrier
    constexpr int64_t kPerMultiprocessor = 4;  // enough bytes under way to fill the memory bus
    int64_t resident = device::max_resident_blocks("topk", topk_kernel<T>);
    int64_t most =
        std::min({resident, kPerMultiprocessor * device::num_multiprocessors(x.device), int64_t{kMaxBlocks}});
    int64_t blocks = std::max(std::min(blocks_for(x.count, kElemsPerBlock), most), int64_t{1});
    device::fill_bytes(&shared->cleared, 0, sizeof(Cleared), stream);
    device::launch_together("topk", topk_kernel<T>, blocks, stream, job);
}

}  // namespace

int64_t topk_workspace_bytes(const Buffer& x, int64_t k) { return Layout(x, k).num_bytes; }

void topk(const Buffer& x, int64_t k, const Buffer& values, int32_t* indices, float* threshold, Workspace& workspace,
          Stream stream) {
    workspace.table.clear();  // overwritten
    with_float_type(x.dtype, [&](auto* type) {
        launch_topk<std::remove_pointer_t<decltype(type)>>(x, k, values, indices, threshold, workspace, stream);
    });
}

}  // namespace pycomm::cuda
