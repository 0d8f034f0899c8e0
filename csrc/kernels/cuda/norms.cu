#include "kernels/norms.h"

#include <cmath>

#include "device/launch.h"
#include "kernels/cuda/norms_pass.h"

namespace pycomm::cuda {
namespace {

// Packets lie where elements' numbers, not their addresses, are multiples of the packet's size: the order of the
// additions, and with it the bits, must not depend on where an array lies.
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

// The sum of an array's slots; by as many threads as share them. kWhole: the whole block, else a warp.
template <bool kWhole>
PYCOMM_DEVICE double sum_of_slots(const Table& table, const Sums<1>* slots, int array) {
    const int64_t begin = table.entries[array].begin, end = table.entries[array + 1].begin;
    const int first = kWhole ? device::thread_index() : device::thread_index() % device::kWarpSize;
    const int stride = kWhole ? device::num_threads() : device::kWarpSize;
    Sums<1> sums = {};
    if (begin < end) {
#pragma unroll 4
        for (int64_t tile = begin / kTile + first; tile <= (end - 1) / kTile; tile += stride) {
            sums.values[0] += slots[tile + array].values[0];
        }
    }
    return kWhole ? sum_block(sums).values[0] : sum_warp(sums.values[0]);
}

PYCOMM_KERNEL clip_kernel(Table table, Scale scale, Clipping clipping) {
    constexpr int64_t kOfWarp = 256;  // slots; more are for the whole block
    PYCOMM_SHARED(uint32_t, is_last, 1);
    squares_of_tile(table, clipping.slots);
    device::block_barrier();
    if (device::thread_index() == 0) {
        device::device_fence();
        *is_last = device::atomic_add(clipping.counter, 1) + 1 == static_cast<uint32_t>(device::num_blocks()) ? 1 : 0;
        device::device_fence();
    }
    device::block_barrier();
    if (*is_last == 0) return;
    auto of_all = factor_of<double>(scale);
    auto write = [&](int array, double squares) {
        double factor = clipping.limit / ((of_all < 0.0 ? -of_all : of_all) * std::sqrt(squares));
        clipping.factors[array] = factor < 1.0 ? static_cast<float>(factor) : 1.0f;  // NaN stays one in the sums
    };
    const int warp = device::thread_index() / device::kWarpSize, warps = device::num_threads() / device::kWarpSize;
    for (int array = 0; array < table.count; ++array) {
        bool is_long = table.entries[array + 1].begin - table.entries[array].begin > kOfWarp * kTile;
        if (is_long) {
            double squares = sum_of_slots<true>(table, clipping.slots, array);
            if (device::thread_index() == 0) write(array, squares);
        } else if (array % warps == warp) {
            double squares = sum_of_slots<false>(table, clipping.slots, array);
            if (device::thread_index() % device::kWarpSize == 0) write(array, squares);
        }
    }
}

}  // namespace

void clip_pass(const Table& table, Scale scale, const Clipping& clipping, Stream stream) {
    device::launch("clipping gradients", clip_kernel, blocks_for(table.total, kTile), stream, table, scale, clipping);
}

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
