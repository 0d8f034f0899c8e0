#include "kernels/norms.h"

#include <cmath>

#include "device/launch.h"
#include "kernels/cuda/grid.h"
#include "kernels/cuda/norms_pass.h"

namespace pycomm::cuda {
namespace {

// Packets begin at multiples of their size in the array, not in memory: the order of the additions, and with it the
// bits, must not depend on an array's address.
template <class T>
PYCOMM_DEVICE double squares_in(const char* x, int64_t from, int count, Share share) {
    constexpr int kCount = 16 / sizeof(T);
    double sum = 0.0;
    auto one = [&](T value) {
        auto wide = static_cast<double>(widen(value));
        sum += wide * wide;
    };
    auto add = [&](int, const Packet<T, kCount>& packet) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) one(packet.values[e]);
    };
    const char* begin = x + from * static_cast<int64_t>(sizeof(T));
    int head = static_cast<int>((kCount - from % kCount) % kCount);
    if (head > count) head = count;
    if (share.first < head) one(load_element<T>(begin, share.first));
    int packets = (count - head) / kCount;
    const char* packed = begin + head * sizeof(T);
    if (reinterpret_cast<uintptr_t>(packed) % sizeof(Packet<T, kCount>) == 0) {
        for_packets<T, kCount>(packed, packets, share, add);
    } else if (reinterpret_cast<uintptr_t>(packed) % sizeof(T) == 0) {
        auto load = [&](int i) {
            Packet<T, kCount> out;
#pragma unroll
            for (int e = 0; e < kCount; ++e) out.values[e] = reinterpret_cast<const T*>(packed)[i * kCount + e];
            return out;
        };
        for_places<2>(packets, share, load, add);
    } else {
        for (int i = share.first * kCount; i < packets * kCount; i += share.stride * kCount) {
#pragma unroll 1
            for (int e = 0; e < kCount; ++e) one(load_element<T>(packed, i + e));
        }
    }
    int rest = head + packets * kCount + share.first;
    if (rest < count) one(load_element<T>(begin, rest));
    return sum;
}

PYCOMM_DEVICE void squares_of_tile(const Table& table, Sums<1>* slots) {
    for_segments(table, [&](const Entry& entry, int64_t from, int64_t, int64_t count, Share share) {
        Sums<1> mine = {};
        with_float_type(entry.dtype, [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            mine.values[0] = squares_in<T>(entry.data, from, static_cast<int>(count), share);
        });
        store_sums(table, entry, share, mine, slots);
    });
}

PYCOMM_KERNEL norms_kernel(Table table, Sums<1>* slots) { squares_of_tile(table, slots); }

PYCOMM_KERNEL clip_kernel(Table table, Scale scale, Clipping clipping) {
    constexpr int64_t kOfWarp = 256;  // slots; more are added up by the whole block
    squares_of_tile(table, clipping.slots);
    if (!counted_as(static_cast<uint32_t>(device::num_blocks()), clipping.counter)) return;
    auto of_all = factor_of<double>(scale);
    auto write = [&](int array, double squares) {
        double factor = clipping.limit / ((of_all < 0.0 ? -of_all : of_all) * std::sqrt(squares));
        clipping.factors[array] = factor < 1.0 ? static_cast<float>(factor) : 1.0f;  // 1 for NaN, which the sums keep
    };
    const int lane = device::thread_index() % device::kWarpSize, warp = device::thread_index() / device::kWarpSize;
    const int warps = device::num_threads() / device::kWarpSize;
    const Share of_block{device::thread_index(), device::num_threads()}, of_warp{lane, device::kWarpSize};
    for (int array = 0; array < table.count; ++array) {
        if (table.entries[array + 1].begin - table.entries[array].begin > kOfWarp * kTile) {
            double squares = sum_block(sums_of_slots(table, clipping.slots, array, of_block)).values[0];
            if (device::thread_index() == 0) write(array, squares);
        } else if (array % warps == warp) {
            double squares = sum_warp(sums_of_slots(table, clipping.slots, array, of_warp).values[0]);
            if (lane == 0) write(array, squares);
        }
    }
}

}  // namespace

void clip_pass(const Table& table, Scale scale, const Clipping& clipping, Stream stream) {
    device::launch<clip_kernel>("clipping gradients", blocks_for(table.total, kTile), stream, table, scale, clipping);
}

int64_t norms_workspace_bytes(const std::vector<Buffer>& arrays) {
    return table_bytes(arrays.size()) + slot_bytes<1>(arrays);
}

void norms(const std::vector<Buffer>& arrays, double* squares, Workspace& workspace, Stream stream) {
    if (arrays.empty()) return;
    Table table = upload(arrays, workspace, stream);
    auto slots = reinterpret_cast<Sums<1>*>(workspace.memory + table_bytes(arrays.size()));
    if (table.total > 0) {
        device::launch<norms_kernel>("norms", blocks_for(table.total, kTile), stream, table, slots);
    }
    add_up("norms", table, slots, squares, stream);
}

}  // namespace pycomm::cuda
