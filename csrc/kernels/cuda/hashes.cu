#include "kernels/hashes.h"

#include "device/launch.h"
#include "kernels/cuda/sums.h"
#include "kernels/random.h"

namespace pycomm::cuda {
namespace {

template <class Bits>
PYCOMM_DEVICE uint64_t hash_of(const char* x, int64_t from, int64_t count, Share share) {
    uint64_t sum = 0;
    for_elements<Bits>(x + from * static_cast<int64_t>(sizeof(Bits)), static_cast<int>(count), share,
                       [&](int i, Bits bits) { sum += hash_term(bits, from + i); });
    return sum;
}

PYCOMM_KERNEL_OF(5) hashes_kernel(Table table, Sums<1, uint64_t>* slots) {
    for_segments(table, [&](const Entry& entry, int64_t from, int64_t, int64_t count, Share share) {
        Sums<1, uint64_t> mine = {};
        switch (entry.dtype) {
            case DType::kI8:
            case DType::kU8:
                mine.values[0] = hash_of<uint8_t>(entry.data, from, count, share);
                break;
            case DType::kF16:
            case DType::kBF16:
                mine.values[0] = hash_of<uint16_t>(entry.data, from, count, share);
                break;
            case DType::kF64:
            case DType::kI64:
                mine.values[0] = hash_of<uint64_t>(entry.data, from, count, share);
                break;
            default:
                mine.values[0] = hash_of<uint32_t>(entry.data, from, count, share);
        }
        store_sums(table, entry, share, mine, slots);
    });
}

}  // namespace

int64_t hashes_workspace_bytes(const std::vector<Buffer>& arrays) {
    return table_bytes(arrays.size()) + slot_bytes<1, uint64_t>(arrays);
}

void hashes(const std::vector<Buffer>& arrays, uint64_t* out, Workspace& workspace, Stream stream) {
    if (arrays.empty()) return;
    Table table = upload(arrays, workspace, stream);
    auto slots = reinterpret_cast<Sums<1, uint64_t>*>(workspace.memory + table_bytes(arrays.size()));
    if (table.total > 0) {
        device::launch<hashes_kernel>("hashes", blocks_for(table.total, kTile), stream, table, slots);
    }
    add_up("hashes", table, slots, out, stream);
}

}  // namespace pycomm::cuda
