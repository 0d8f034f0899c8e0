#include "kernels/cuda/table.h"

#include <algorithm>
#include <utility>

#include "device/launch.h"

namespace pycomm::cuda {
namespace {

constexpr int kEntriesPerLaunch = 160;  // 3,840 of the 4,096 bytes that a kernel's arguments may take

struct Chunk {
    Entry entries[kEntriesPerLaunch];
    int count;
};

PYCOMM_KERNEL write_entries(Chunk chunk, Entry* to, Zeros zeros) {
    clear(zeros, device::thread_index(), device::num_threads());
    for (int i = device::thread_index(); i < chunk.count; i += device::num_threads()) to[i] = chunk.entries[i];
}

bool same(const Entry& a, const Entry& b) { return a.data == b.data && a.begin == b.begin && a.dtype == b.dtype; }

}  // namespace

int64_t table_bytes(size_t num_arrays) { return static_cast<int64_t>((num_arrays + 1) * sizeof(Entry)); }

Table upload(const std::vector<Buffer>& arrays, Workspace& workspace, Stream stream, Zeros zeros) {
    std::vector<Entry> wanted;
    wanted.reserve(arrays.size() + 1);
    int64_t total = 0;
    for (const Buffer& array : arrays) {
        wanted.push_back({array.bytes(), total, array.dtype});
        total += array.count;
    }
    wanted.push_back({nullptr, total, DType::kF32});
    auto memory = reinterpret_cast<Entry*>(workspace.memory);
    bool capturing =
        device::is_capturing(stream);  // then the upload becomes part of the graph, and does not happen now
    std::vector<Entry> there;          // empty until everything has been sent
    there.swap(workspace.table);
    for (size_t begin = 0; begin < wanted.size(); begin += kEntriesPerLaunch) {
        Chunk chunk = {};
        chunk.count = static_cast<int>(std::min<size_t>(kEntriesPerLaunch, wanted.size() - begin));
        auto from = wanted.begin() + static_cast<int64_t>(begin);
        bool known = there.size() == wanted.size() &&
                     std::equal(from, from + chunk.count, there.begin() + static_cast<int64_t>(begin), same);
        if (known && !capturing && zeros.num_bytes == 0) continue;
        std::copy_n(from, chunk.count, chunk.entries);
        device::launch<write_entries>("sending a table of arrays", 1, stream, chunk, memory + begin, zeros);
        zeros = {};  // done
    }
    if (!capturing) workspace.table = std::move(wanted);
    return {memory, static_cast<int>(arrays.size()), total};
}

}  // namespace pycomm::cuda
