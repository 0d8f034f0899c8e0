#include "kernels/indices.h"

#include "device/launch.h"
#include "kernels/cuda/faults.h"
#include "kernels/cuda/grid.h"
#include "kernels/cuda/host.h"
#include "kernels/cuda/words.h"

namespace pycomm::cuda {
namespace {

constexpr int64_t kMostBlocks = 1024;  // of unpack: each of them adds up what all others counted

PYCOMM_KERNEL pack_indices_kernel(Packing packing, const int32_t* indices, uint32_t* words) {
    const int64_t thread = thread_of_grid(), stride = threads_of_grid();
    write_all_words(packing, indices, words, thread, stride);
    for (int64_t m = thread; m < packing.count; m += stride) {
        int32_t index = indices[m];
        if (index < (m == 0 ? 0 : indices[m - 1]) || index < 0 || index >= packing.range) {
            report(packing.fault, Mistake::kPackedIndex, m, index, packing.range);
        }
    }
}

// Counts the bits that are set in each block's part of the upper words.
PYCOMM_KERNEL count_indices_kernel(Packing packing, const uint32_t* words, uint32_t* counts) {
    int64_t in_block = count_upper_bits(packing, words, part_of(packing.upper_words));
    if (device::thread_index() == 0) counts[device::block_index()] = static_cast<uint32_t>(in_block);
}

PYCOMM_KERNEL unpack_indices_kernel(Packing packing, const uint32_t* words, const uint32_t* counts, int32_t* indices) {
    uint64_t before = 0, total = 0;
    sum_blocks(counts, &before, &total);
    Unpacked mine = unpack_part(packing, words, part_of(packing.upper_words), static_cast<int64_t>(before), indices,
                                false, [](int64_t, int64_t, int64_t) {});
    if (mine.wrong || total != static_cast<uint64_t>(packing.count)) {
        report(packing.fault, Mistake::kPackedWords, packing.count, 0, packing.range);
    }
}

int64_t blocks_of_unpack(const Packing& packing) {
    int64_t blocks = blocks_for(packing.upper_words, device::threads_per_block() * int64_t{4});
    return blocks < kMostBlocks ? blocks : kMostBlocks;
}

}  // namespace

void pack_indices(const int32_t* indices, int64_t count, int64_t range, uint32_t* words, Stream stream) {
    Packing packing = packing_of(range, count);
    device::launch<pack_indices_kernel>("pack_indices", blocks_for(count, device::threads_per_block()), stream, packing,
                                        indices, words);
}

int64_t unpack_indices_workspace_bytes(int64_t, int64_t) { return kMostBlocks * int64_t{sizeof(uint32_t)}; }

void unpack_indices(const uint32_t* words, int64_t count, int64_t range, int32_t* indices, Workspace& workspace,
                    Stream stream) {
    workspace.table.clear();  // overwritten
    Packing packing = packing_of(range, count);
    auto counts = reinterpret_cast<uint32_t*>(workspace.memory);
    int64_t blocks = blocks_of_unpack(packing);
    device::launch<count_indices_kernel>("unpack_indices", blocks, stream, packing, words, counts);
    device::launch<unpack_indices_kernel>("unpack_indices", blocks, stream, packing, words,
                                          static_cast<const uint32_t*>(counts), indices);
}

}  // namespace pycomm::cuda
