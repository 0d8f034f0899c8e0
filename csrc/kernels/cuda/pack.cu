#include "kernels/pack.h"

#include <algorithm>

#include "device/launch.h"
#include "kernels/cuda/table.h"
#include "kernels/unpack.h"

namespace pycomm::cuda {
namespace {

constexpr double kNoLimit = __builtin_inf();

template <class Flat>
PYCOMM_DEVICE void write_flags(const Table& table, const PackFlags& flags) {
    const int first = device::thread_index(), stride = device::num_threads();
    const auto put = [&](int64_t place, bool value) {
        store_element(flags.out, place, narrow<Flat>(value ? 1.0f : 0.0f));
    };
    for (int j = first; j < table.count; j += stride) put(j, table.entries[j].data != nullptr);
    for (int i = first; i < flags.num_bits; i += stride) {
        const bool there = flags.bits != nullptr, bit = there && flags.bits[i];
        put(table.count + 1 + i, bit);
        put(table.count + 1 + flags.num_bits + i, there && !bit);
    }
}

template <class Flat>
PYCOMM_KERNEL pack_kernel(Table table, char* out, Scale scale, double limit, bool* finite, const bool* unless,
                          PackFlags flags) {
    if (unless != nullptr && *unless) return;
    const Factor factor(scale);
    bool all = true;
    for_segments<kLongTile>(table, [&](const Entry& entry, int64_t from, int64_t to, int64_t count, Share share) {
        if (entry.data == nullptr) {
            for (int64_t i = share.first; i < count; i += share.stride) store_element(out, to + i, narrow<Flat>(0.0f));
            return;
        }
        with_float_type(entry.dtype, [&](auto* type) {
            using Src = std::remove_pointer_t<decltype(type)>;
            using Wide = WiderOf<Src, Flat>;
            const char* src = entry.data + from * static_cast<int64_t>(sizeof(Src));
            char* dst = out + to * static_cast<int64_t>(sizeof(Flat));
            all &= convert_segment<Src, Flat>(src, dst, static_cast<int>(count), factor.as<Wide>(),
                                              static_cast<Wide>(limit), share);
        });
    });
    if (finite != nullptr && !all) *finite = false;
    if (flags.out == nullptr) return;
    if (!all) store_element(flags.out, table.count, narrow<Flat>(1.0f));  // the kernel before has set it to 0
    if (device::block_index() == 0) write_flags<Flat>(table, flags);
}

template <class Flat>
PYCOMM_KERNEL unpack_kernel(const char* flat, Table table, Scale scale) {
    const Factor factor(scale);
    for_segments<kLongTile>(table, [&](const Entry& entry, int64_t to, int64_t from, int64_t count, Share share) {
        with_float_type(entry.dtype, [&](auto* type) {
            using Dst = std::remove_pointer_t<decltype(type)>;
            using Wide = WiderOf<Flat, Dst>;
            const char* src = flat + from * static_cast<int64_t>(sizeof(Flat));
            char* dst = entry.data + to * static_cast<int64_t>(sizeof(Dst));
            convert_segment<Flat, Dst>(src, dst, static_cast<int>(count), factor.as<Wide>(),
                                       static_cast<Wide>(kNoLimit), share);
        });
    });
}

}  // namespace

int64_t pack_workspace_bytes(std::size_t num_arrays) { return table_bytes(num_arrays); }
int64_t unpack_workspace_bytes(std::size_t num_arrays) { return table_bytes(num_arrays); }

void pack(const std::vector<Buffer>& srcs, const Buffer& out, Scale scale, double limit, bool* finite,
          const bool* unless, Workspace& workspace, Stream stream) {
    if (finite != nullptr) device::fill_bytes(finite, 1, 1, stream);
    if (out.count == 0) return;
    Table table = upload(srcs, workspace, stream);
    with_float_type(out.dtype, [&](auto* type) {
        using Flat = std::remove_pointer_t<decltype(type)>;
        device::launch<pack_kernel<Flat>>("pack", blocks_for(table.total, kLongTile), stream, table, out.bytes(), scale,
                                          limit, finite, unless, PackFlags{});
    });
}

void pack(const std::vector<Buffer>& srcs, const Buffer& out, PackFlags flags, Scale scale, double limit,
          Workspace& workspace, Stream stream) {
    const int64_t size = size_of(out.dtype);
    char* too_large = flags.out + static_cast<int64_t>(srcs.size()) * size;
    Table table = upload(srcs, workspace, stream, {too_large, size});
    with_float_type(out.dtype, [&](auto* type) {
        using Flat = std::remove_pointer_t<decltype(type)>;
        const int64_t blocks = std::max<int64_t>(blocks_for(table.total, kLongTile), 1);
        device::launch<pack_kernel<Flat>>("pack", blocks, stream, table, out.bytes(), scale, limit, nullptr, nullptr,
                                          flags);
    });
}

void unpack(const Buffer& flat, const std::vector<Buffer>& outs, Scale scale, Workspace& workspace, Stream stream) {
    if (flat.count == 0) return;
    Table table = upload(outs, workspace, stream);
    with_float_type(flat.dtype, [&](auto* type) {
        using Flat = std::remove_pointer_t<decltype(type)>;
        device::launch<unpack_kernel<Flat>>("unpack", blocks_for(table.total, kLongTile), stream, flat.bytes(), table,
                                            scale);
    });
}

}  // namespace pycomm::cuda
