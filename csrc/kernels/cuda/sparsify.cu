// Two kernels:
//
//   accumulate   the sums, and a bit for each that exceeds what its gradient's last threshold suggests
//   select       one block per gradient: a list of the elements that have a bit, in order, and of that list the exact
//                k-th key by radix, as topk does it; or of the gradient's whole part of acc where the list is no good
#include "kernels/sparsify.h"

#include "device/launch.h"
#include "kernels/cuda/accumulate_pass.h"
#include "kernels/cuda/marked.h"
#include "kernels/cuda/topk_select.h"

namespace pycomm::cuda {
namespace {

using namespace selection;

struct Choice {
    const Entry* grads;
    const Entry* outs;  // how many of each gradient, as arrays that follow each other
    const char* acc;
    char* values;
    int32_t* indices;
    float* thresholds;
    bool* missed;
    Marks marks;
    int64_t shift;
    uint32_t* list_keys;
    uint32_t* list_indices;
};

// One gradient's part of everything.
struct Elected {
    int64_t begin, end;  // in acc
    int64_t start;       // in the outputs
    int64_t k;
    int64_t list;  // where its list begins
    int64_t capacity;

    PYCOMM_MEMBER Elected(const Choice& job, int j) {
        begin = job.grads[j].begin;
        end = job.grads[j + 1].begin;
        start = job.outs[j].begin - job.outs[0].begin;
        k = job.outs[j + 1].begin - job.outs[j].begin;
        list = place_of_list(begin, start, j);
        capacity = place_of_list(end, start + k, j + 1) - list;
    }

    // Room for twice what is wanted, and for some that are in the way.
    PYCOMM_HOST_DEVICE int64_t place_of_list(int64_t before, int64_t wanted_before, int64_t gradients_before) {
        return 2 * wanted_before + before / 128 + 64 * gradients_before;
    }
};

// Lists what is marked. Returns how many; 0: fewer than k, or more than there is room for.
template <class K>
PYCOMM_DEVICE uint32_t list_marked(const Choice& job, const Elected& mine) {
    MarkedRange marked{job.marks.words, mine.begin + job.shift, mine.end + job.shift};
    uint64_t before = 0, total = marked.count(&before);
    if (total < static_cast<uint64_t>(mine.k) || total > static_cast<uint64_t>(mine.capacity)) return 0;
    marked.list(static_cast<uint64_t>(mine.list) + before, [&](uint64_t place, int64_t bit) {
        int64_t index = bit - job.shift;
        job.list_keys[place] = static_cast<uint32_t>(K::of(load_element<typename K::Bits>(job.acc, index)));
        job.list_indices[place] = static_cast<uint32_t>(index);
    });
    return static_cast<uint32_t>(total);  // seen by all after the next barrier, which counting begins with
}

template <class T>
PYCOMM_KERNEL select_kernel(Choice job) {
    using K = Keys<T>;
    using Key = typename K::Key;
    PYCOMM_SHARED(uint32_t, counts, kBins);
    const int j = device::block_index();
    const Elected mine(job, j);
    if (mine.k == 0) return;
    uint32_t listed = 0;
    if constexpr (std::is_same_v<T, float>) {
        float earlier = job.thresholds[j];
        if (earlier > 0.0f && is_finite(earlier) && mine.k <= (mine.end - mine.begin) / 2) {
            listed = list_marked<K>(job, mine);
            if (listed == 0 && device::thread_index() == 0) job.missed[j] = true;
        }
    }
    Part part{0, listed != 0 ? listed : mine.end - mine.begin};
    auto key_at = [&](int64_t i) -> Key {
        if (listed != 0) return job.list_keys[mine.list + i];
        return K::of(load_element<typename K::Bits>(job.acc, mine.begin + i));
    };
    auto wanted = static_cast<uint32_t>(mine.k);
    Threshold<K> threshold = find_threshold<K>(wanted, [&](int, int low, Key decided, Key prefix) {
        count_digits_in_block<Key>(counts, part, low, decided, prefix, key_at);
        return counts;
    });
    for_selected<K>(part, threshold, 0, key_at, [&](uint32_t place, int64_t i) {
        int64_t index = listed != 0 ? job.list_indices[mine.list + i] : mine.begin + i;
        job.indices[mine.start + place] = static_cast<int32_t>(index);
        store_element(job.values, mine.start + place, load_element<typename K::Bits>(job.acc, index));
    });
    if (device::thread_index() == 0) job.thresholds[j] = K::float_of(threshold.key);
}

// Layout of the workspace, behind the table.
struct Layout {
    int64_t words, keys, indices, num_bytes;

    Layout(const Accumulation& job, const Selection& selection) {
        bool marks = job.acc.dtype == DType::kF32;
        auto num_grads = static_cast<int64_t>(job.grads.size());
        int64_t listed = marks ? Elected::place_of_list(job.acc.count, selection.values.count, num_grads) : 0;
        words = round_up(table_bytes(2 * job.grads.size() + job.weights.size()));
        keys = words + (marks ? round_up(words_of_marks(job.acc.count) * 4) : 0);
        indices = keys + round_up(listed * 4);
        num_bytes = indices + round_up(listed * 4);
    }

    static int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }
};

}  // namespace

int64_t sparsify_workspace_bytes(const Accumulation& job, const Selection& selection) {
    return Layout(job, selection).num_bytes;
}

void sparsify(const Accumulation& job, Scale scale, const Selection& selection, bool* finite, Workspace& workspace,
              Stream stream) {
    const auto num_grads = static_cast<int64_t>(job.grads.size());
    const Layout layout(job, selection);
    device::fill_bytes(selection.missed, 0, num_grads, stream);
    std::vector<Buffer> arrays = arrays_of(job);
    for (int64_t count : selection.counts) arrays.push_back({nullptr, count, job.acc.dtype});
    const Entry* entries = upload(arrays, workspace, stream).entries;
    char* memory = workspace.memory;
    Marks marks;
    if (job.acc.dtype == DType::kF32) {
        marks = {reinterpret_cast<uint32_t*>(memory + layout.words), selection.thresholds};
    }
    accumulate_pass(job, entries, scale, finite, marks, stream);
    if (selection.values.count == 0) return;
    Choice choice{entries,
                  entries + num_grads + static_cast<int64_t>(job.weights.size()),
                  job.acc.bytes(),
                  selection.values.bytes(),
                  selection.indices,
                  selection.thresholds,
                  selection.missed,
                  marks,
                  shift_of(job.acc),
                  reinterpret_cast<uint32_t*>(memory + layout.keys),
                  reinterpret_cast<uint32_t*>(memory + layout.indices)};
    if (job.acc.dtype == DType::kF64) {
        device::launch("sparsify", select_kernel<double>, num_grads, stream, choice);
    } else {
        device::launch("sparsify", select_kernel<float>, num_grads, stream, choice);
    }
}

}  // namespace pycomm::cuda
