#include "kernels/hashes.h"

#include "device/launch.h"
#include "kernels/cuda/sums.h"
#include "kernels/random.h"

namespace pycomm::cuda {
namespace {

// Packets lie where addresses allow: sums of whole numbers do not ask in which order.
template <class Bits>
PYCOMM_DEVICE uint64_t hash_of(const char* x, int64_t from, int64_t count, Share share) {
    constexpr int kCount = 16 / sizeof(Bits);
    constexpr int kUnroll = 4;
    const char* base = x + from * static_cast<int64_t>(sizeof(Bits));
    uint64_t sum = 0;
    int64_t head = -1;
    bool misfit = false;
    align<Bits, kCount>(base, head, misfit);
    if (misfit || head > count) head = count;
    for (int64_t i = share.first; i < head; i += share.stride) sum += hash_term(load_element<Bits>(base, i), from + i);
    int64_t packets = (count - head) / kCount;
    auto packed = reinterpret_cast<const Packet<Bits, kCount>*>(base + head * static_cast<int64_t>(sizeof(Bits)));
    for (int64_t i = share.first; i < packets; i += kUnroll * share.stride) {
        Packet<Bits, kCount> in[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            if (i + u * share.stride < packets) in[u] = packed[i + u * share.stride];
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            int64_t packet = i + u * share.stride;
            if (packet >= packets) break;
#pragma unroll
            for (int e = 0; e < kCount; ++e) sum += hash_term(in[u].values[e], from + head + packet * kCount + e);
        }
    }
    for (int64_t i = head + packets * kCount + share.first; i < count; i += share.stride) {
        sum += hash_term(load_element<Bits>(base, i), from + i);
    }
    return sum;
}

PYCOMM_KERNEL hashes_kernel(Table table, Sums<1, uint64_t>* slots) {
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
        device::launch("hashes", hashes_kernel, blocks_for(table.total, kTile), stream, table, slots);
    }
    add_up("hashes", table, slots, out, stream);
}

}  // namespace pycomm::cuda
