#include "kernels/pack.h"

#include "device/launch.h"
#include "kernels/cuda/table.h"
#include "kernels/unpack.h"

namespace pycomm::cuda {
namespace {

constexpr double kNoLimit = __builtin_inf();

template <class Flat>
PYCOMM_KERNEL pack_kernel(Table table, char* out, Scale scale, double limit, bool* finite, const bool* unless) {
    if (unless != nullptr && *unless) return;
    const Factor factor(scale);
    bool all = true;
    for_segments<kLongTile>(table, [&](const Entry& entry, int64_t from, int64_t to, int64_t count, Share share) {
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
        device::launch("pack", pack_kernel<Flat>, blocks_for(table.total, kLongTile), stream, table, out.bytes(), scale,
                       limit, finite, unless);
    });
}

void unpack(const Buffer& flat, const std::vector<Buffer>& outs, Scale scale, Workspace& workspace, Stream stream) {
    if (flat.count == 0) return;
    Table table = upload(outs, workspace, stream);
    with_float_type(flat.dtype, [&](auto* type) {
        using Flat = std::remove_pointer_t<decltype(type)>;
        device::launch("unpack", unpack_kernel<Flat>, blocks_for(table.total, kLongTile), stream, flat.bytes(), table,
                       scale);
    });
}

}  // namespace pycomm::cuda
