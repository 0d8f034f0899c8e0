// Turns marks, a bit per element, into a list of the marked elements, in order. One block does it, without barriers in
// its loops: every warp has a part of the words to itself.
#pragma once

#include <cstdint>

#include "device/intrinsics.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/grid.h"

namespace pycomm::cuda {

// This warp's part of its block's `items`.
PYCOMM_DEVICE Part part_of_warp(Part items) {
    int warp = device::thread_index() / device::kWarpSize, warps = device::num_threads() / device::kWarpSize;
    int64_t count = items.end - items.begin;
    return {items.begin + count * warp / warps, items.begin + count * (warp + 1) / warps};
}

// Bits [begin, end) of words that lie on a border of 16 bytes and fill whole packets.
struct MarkedRange {
    static constexpr int kWords = 4;  // per packet
    static constexpr int kUnroll = 4;
    static constexpr int64_t kBits = 32 * kWords;
    static constexpr int64_t kTilePackets = 8;  // warps have whole tiles of 1,024 bits, as when marking
    using Words = Packet<uint32_t, kWords>;

    const uint32_t* words;
    int64_t begin, end;

    // The words of packet i, without bits outside the range.
    PYCOMM_MEMBER Words within(Words packet, int64_t i) const {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            int64_t at = i * kBits + 32 * w;
            if (at + 32 <= begin || at >= end) packet.values[w] = 0;
            if (at < begin && at + 32 > begin) packet.values[w] &= 0xffffffffu << (begin - at);
            if (at < end && at + 32 > end) packet.values[w] &= 0xffffffffu >> (at + 32 - end);
        }
        return packet;
    }

    // Calls row(first bit of this lane's packet, the packet) for all packets of the warp's part, in order, 32 at a
    // time.
    template <class Row>
    PYCOMM_MEMBER void for_rows(Row&& row) const {
        if (begin >= end) return;  // the whole block
        constexpr int64_t kTileBits = kTilePackets * kBits;
        Part part = part_of_warp({begin / kTileBits, (end + kTileBits - 1) / kTileBits});
        part = {part.begin * kTilePackets, part.end * kTilePackets};
        if (part.end > (end + kBits - 1) / kBits) part.end = (end + kBits - 1) / kBits;
        int64_t lane = device::thread_index() % device::kWarpSize;
        for (int64_t base = part.begin; base < part.end; base += kUnroll * device::kWarpSize) {
            // All loads before any use, and none under a condition: otherwise each would be waited for.
            Words packets[kUnroll];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                int64_t i = base + u * device::kWarpSize + lane;
                packets[u] = reinterpret_cast<const Words*>(words)[i < part.end ? i : part.end - 1];
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                int64_t i = base + u * device::kWarpSize + lane;
                row(i * kBits, i < part.end ? within(packets[u], i) : Words{});
            }
        }
    }

    PYCOMM_MEMBER static uint32_t ones_of(const Words& packet) {
        uint32_t ones = 0;
        for (int w = 0; w < kWords; ++w) ones += static_cast<uint32_t>(device::count_ones(packet.values[w]));
        return ones;
    }

    // How many bits are set, and how many of them before this warp's part.
    PYCOMM_MEMBER uint32_t count(uint64_t* before_warp) const {
        uint64_t mine = 0, total = 0;
        for_rows([&](int64_t, const Words& packet) { mine += ones_of(packet); });
        *before_warp = device::shuffle(scan_block(mine, &total), 0);
        return static_cast<uint32_t>(total);
    }

    // Calls emit(place, bit) for every bit that is set; this warp's places begin at `at`.
    template <class Emit>
    PYCOMM_MEMBER void list(uint64_t at, Emit&& emit) const {
        for_rows([&](int64_t first, const Words& packet) {
            uint32_t ones = ones_of(packet);
            if (device::ballot(ones != 0) == 0) return;
            uint32_t up_to_here = scan_warp(ones);
            uint64_t place = at + up_to_here - ones;
            for (int w = 0; w < kWords; ++w) {
                for (uint32_t left = packet.values[w]; left != 0; left &= left - 1) {
                    emit(place++, first + 32 * w + device::lowest_one(left));
                }
            }
            at += device::shuffle(up_to_here, device::kWarpSize - 1);
        });
    }
};

}  // namespace pycomm::cuda
