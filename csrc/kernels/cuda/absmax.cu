#include "kernels/absmax.h"

#include "device/launch.h"
#include "kernels/cuda/table.h"

namespace pycomm::cuda {
namespace {

constexpr uint32_t kNan = 0x7fc00000u;

// The bits of magnitudes order like unsigned integers, NaN above all.
template <class T>
PYCOMM_DEVICE uint32_t magnitude_bits(T x) {
    auto value = widen(x);
    if (value != value) return kNan;
    return device::bits_of(static_cast<float>(value)) & 0x7fffffffu;  // rounding keeps the order of doubles
}

template <class T>
PYCOMM_DEVICE uint32_t largest_in(const char* x, int count, Share share) {
    uint32_t largest = 0;
    for_elements<T>(x, count, share, [&](int, T value) {
        uint32_t bits = magnitude_bits(value);
        largest = bits > largest ? bits : largest;
    });
    return largest;
}

PYCOMM_KERNEL absmax_kernel(Table table, uint32_t* out) {
    uint32_t largest = 0;
    for_segments<kLongTile>(table, [&](const Entry& entry, int64_t from, int64_t, int64_t count, Share share) {
        with_float_type(entry.dtype, [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            const char* x = entry.data + from * static_cast<int64_t>(sizeof(T));
            uint32_t here = largest_in<T>(x, static_cast<int>(count), share);
            largest = here > largest ? here : largest;
        });
    });
    for (int distance = device::kWarpSize / 2; distance > 0; distance /= 2) {
        uint32_t other = device::shuffle_up(largest, distance);
        largest = other > largest ? other : largest;
    }
    // The last lane has seen all. Most warps bring nothing new: a read is cheaper than an atomic.
    bool last = device::thread_index() % device::kWarpSize == device::kWarpSize - 1;
    if (last && largest > device::atomic_read(out)) device::atomic_max(out, largest);
}

}  // namespace

int64_t absmax_workspace_bytes(std::size_t num_arrays) { return table_bytes(num_arrays); }

void absmax(const std::vector<Buffer>& arrays, float* out, Workspace& workspace, Stream stream) {
    device::fill_bytes(out, 0, sizeof(float), stream);
    Table table = upload(arrays, workspace, stream);
    if (table.total == 0) return;
    device::launch<absmax_kernel>("absmax", blocks_for(table.total, kLongTile), stream, table,
                                  reinterpret_cast<uint32_t*>(out));
}

}  // namespace pycomm::cuda
