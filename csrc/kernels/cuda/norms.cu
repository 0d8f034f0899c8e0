#include "kernels/norms.h"

#include "device/launch.h"
#include "kernels/cuda/sums.h"

namespace pycomm::cuda {
namespace {

// Packets lie where elements' numbers, not their addresses, are multiples of the packet's size: the order of the
// additions, and with it the bits, must not depend on where an array lies.
template <class T>
PYCOMM_DEVICE double squares_in(const char* x, int64_t from, int64_t count, Share share) {
    constexpr int kCount = 16 / sizeof(T);
    constexpr int kUnroll = 4;
    double sum = 0.0;
    auto one = [&](T value) {
        auto wide = static_cast<double>(widen(value));
        sum += wide * wide;
    };
    int64_t head = (kCount - from % kCount) % kCount;
    if (head > count) head = count;
    if (share.first < head) one(load_element<T>(x, from + share.first));
    int64_t packets = (count - head) / kCount;
    for (int64_t i = share.first; i < packets; i += kUnroll * share.stride) {
        Packet<T, kCount> in[kUnroll] = {};  // zeros change no sum
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            int64_t packet = i + u * share.stride;
            if (packet < packets) in[u] = load_packet<T, kCount>(x, from + head + packet * kCount);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
            for (int e = 0; e < kCount; ++e) one(in[u].values[e]);
        }
    }
    int64_t rest = head + packets * kCount + share.first;
    if (rest < count) one(load_element<T>(x, from + rest));
    return sum;
}

PYCOMM_KERNEL norms_kernel(Table table, Sums<1>* slots) {
    for_segments(table, [&](const Entry& entry, int64_t from, int64_t, int64_t count, Share share) {
        Sums<1> mine = {};
        with_float_type(entry.dtype, [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            mine.values[0] = squares_in<T>(entry.data, from, count, share);
        });
        store_sums(table, entry, share, mine, slots);
    });
}

}  // namespace

int64_t norms_workspace_bytes(const std::vector<Buffer>& arrays) {
    return table_bytes(arrays.size()) + slot_bytes<1>(arrays);
}

void norms(const std::vector<Buffer>& arrays, double* squares, Workspace& workspace, Stream stream) {
    if (arrays.empty()) return;
    Table table = upload(arrays, workspace, stream);
    auto slots = reinterpret_cast<Sums<1>*>(workspace.memory + table_bytes(arrays.size()));
    if (table.total > 0) {
        device::launch("norms", norms_kernel, blocks_for(table.total, kTile), stream, table, slots);
    }
    add_up("norms", table, slots, squares, stream);
}

}  // namespace pycomm::cuda
