// Two kernels:
//
//   accumulate   computes the sums, and marks with a bit each that exceeds the hint of its gradient's last threshold
//   select       selects the k largest of every gradient, as topk does, from the marked elements or from those that a
//                sample suggests. Each block has an equal part of all elements. The blocks that share a gradient are a
//                team; a block with parts of several gradients goes through them in order.
#include "kernels/sparsify.h"

#include <algorithm>

#include "device/launch.h"
#include "kernels/cuda/accumulate_pass.h"
#include "kernels/cuda/topk_select.h"
#include "kernels/topk.h"

namespace pycomm::cuda {
namespace {

using namespace selection;

struct Choice {
    const Entry* grads;
    const Entry* outs;  // outputs of each gradient, as consecutive arrays
    int num_grads;
    const char* acc;
    char* values;
    int32_t* indices;
    float* thresholds;
    bool* finite;
    bool* missed;
    int32_t* num_missed;
    float* largest;
    const bool* not_finite;
    Marks marks;
    int64_t shift;
    Record* records;
    int num_records;
    uint32_t* slots;  // three for every block and gradient
    char* edges;
    uint32_t* words;
    char* list_keys;
    uint32_t* list_indices;
};

// Where a gradient's part of the list begins: each has room for twice its k, and for some more.
PYCOMM_HOST_DEVICE int64_t place_of_list(int64_t before, int64_t wanted_before, int64_t gradients_before) {
    return 2 * wanted_before + before / 128 + 64 * gradients_before;
}

// The same for the marks of samples, in words.
PYCOMM_HOST_DEVICE int64_t place_of_words(int64_t before, int64_t gradients_before) {
    return (before / 1024 + 3 * gradients_before) * 32;
}

// One gradient's part of everything.
struct Elected {
    int64_t begin, end;  // in acc
    int64_t start, k;    // in the outputs
    int first, last;     // blocks of the team

    PYCOMM_MEMBER Elected(const Choice& job, int j) {
        begin = job.grads[j].begin;
        end = job.grads[j + 1].begin;
        start = job.outs[j].begin - job.outs[0].begin;
        k = job.outs[j + 1].begin - job.outs[j].begin;
        first = owner_of(job, begin);
        last = end > begin ? owner_of(job, end - 1) : first;
    }

    // The block that has element i: the last one whose part begins at or before it.
    PYCOMM_MEMBER static int owner_of(const Choice& job, int64_t i) {
        int64_t total = job.grads[job.num_grads].begin;
        return static_cast<int>(((i + 1) * device::num_blocks() - 1) / total);
    }

    PYCOMM_MEMBER bool has_team() const { return first < last; }

    // Each gradient has its own record if there are enough. Otherwise a team uses the record of its first block, in
    // which no other team can begin, and blocks on their own use the records after the teams' ones.
    PYCOMM_MEMBER int record(const Choice& job, int j) const {
        if (job.num_records >= job.num_grads) return j;
        return has_team() ? first : device::num_blocks() + first;
    }

    template <class K>
    PYCOMM_MEMBER Job<K> job_of(const Choice& job, int j) const {
        const int64_t list = place_of_list(begin, start, j);
        const int64_t num_slots = int64_t{device::num_blocks()} + job.num_grads;
        uint32_t* slots = job.slots + first + j;  // no other team's: from one gradient to the next, first + j grows
        return {job.acc + begin * static_cast<int64_t>(sizeof(typename K::Bits)),
                static_cast<uint32_t>(end - begin),
                static_cast<uint32_t>(k),
                job.thresholds + j,
                job.values + start * static_cast<int64_t>(sizeof(typename K::Bits)),
                reinterpret_cast<char*>(job.indices + start),
                reinterpret_cast<uint32_t*>(job.largest),
                begin,
                sample_rank_of(end - begin, k),
                static_cast<uint32_t>(place_of_list(end, start + k, j + 1) - list),
                job.records + record(job, j),
                slots,
                slots + num_slots,
                slots + 2 * num_slots,
                reinterpret_cast<Edge<typename K::Key>*>(job.edges) + record(job, j) * int64_t{kMostEdges},
                job.words + place_of_words(begin, j),
                reinterpret_cast<typename K::Key*>(job.list_keys) + list,
                job.list_indices + list};
    }
};

template <class K>
PYCOMM_DEVICE void select_of(const Choice& choice, const Elected& mine, int j, uint32_t* counts) {
    using Key = typename K::Key;
    const Job<K> job = mine.job_of<K>(choice, j);
    Team team{&job.record->meeting, device::block_index() - mine.first, mine.last - mine.first + 1};
    Candidates<K> found = {};
    bool missed = false;
    if constexpr (std::is_same_v<Key, uint32_t>) {
        float earlier = *job.threshold;
        if (earlier > 0.0f && is_finite(earlier) && job.k <= job.count / 2) {
            MarkedRange all{choice.marks.words, mine.begin + choice.shift, mine.end + choice.shift};
            found = list_marked(job, all, Floor<K>{K::near(kThresholdHint * earlier)}, counts, team);
            missed = !found.listed;
        }
    }
    if (!found.listed && job.sample_rank != 0) {
        Key lowest = sample(job, counts, team);
        found = list_from(job, Floor<K>{lowest > 0 ? lowest : Key{1}}, counts, team);
    }
    select(job, found, counts, team);
    if (team.rank != 0 || device::thread_index() != 0) return;
    choice.missed[j] = missed;
    if (missed && choice.num_missed != nullptr) device::atomic_add(reinterpret_cast<uint32_t*>(choice.num_missed), 1);
}

template <class T>
PYCOMM_KERNEL_OF(2)
select_kernel(Choice job) {
    PYCOMM_SHARED(uint32_t, counts, kBins);
    const Table grads{job.grads, job.num_grads, job.grads[job.num_grads].begin};
    const int64_t begin = grads.total * device::block_index() / device::num_blocks();
    const int64_t end = grads.total * (device::block_index() + 1) / device::num_blocks();
    for (int j = array_at(grads, begin); j < job.num_grads && job.grads[j].begin < end; ++j) {
        const Elected mine(job, j);
        if (mine.k > 0) select_of<Keys<T>>(job, mine, j, counts);
    }
    for (int j = device::block_index() * device::num_threads() + device::thread_index(); j < job.num_grads;
         j += device::num_blocks() * device::num_threads()) {
        job.finite[j] = !job.not_finite[j];
        if (job.outs[j].begin == job.outs[j + 1].begin) job.missed[j] = false;
    }
}

// Layout of the workspace, behind the table.
struct Layout {
    int64_t counter, not_finite, records, slots, clipping, edges, marks, words, keys, indices, num_bytes;

    Layout(const Accumulation& job, const Selection& selection) {
        const bool is_float = job.acc.dtype == DType::kF32;
        const auto num_grads = static_cast<int64_t>(job.grads.size());
        const int64_t listed = place_of_list(job.acc.count, selection.values.count, num_grads);
        const int64_t num_records = records_for(num_grads, kMaxBlocks);
        const int64_t edge_bytes = is_float ? sizeof(Edge<uint32_t>) : sizeof(Edge<uint64_t>);
        counter = round_up(table_bytes(2 * job.grads.size() + job.weights.size()));
        not_finite = counter + 16;
        records = counter + round_up(16 + num_grads);
        slots = records + round_up(num_records * int64_t{sizeof(Record)});
        edges = slots + round_up(3 * (kMaxBlocks + num_grads) * 4);
        marks = edges + round_up(num_records * kMostEdges * edge_bytes);
        words = marks + (is_float ? round_up(words_of_marks(job.acc.count) * 4) : 0);
        keys = words + round_up(place_of_words(job.acc.count, num_grads) * 4);
        indices = keys + round_up(listed * size_of(job.acc.dtype));
        clipping = indices + round_up(listed * 4);
        num_bytes = clipping + clipping_bytes(job);
    }

    static int64_t records_for(int64_t num_grads, int64_t blocks) { return std::min(num_grads, 2 * blocks); }
};

Choice choice_of(const Accumulation& job, const Selection& selection, const Layout& layout, const Entry* entries,
                 bool* finite, char* memory) {
    const auto num_grads = static_cast<int>(job.grads.size());
    Choice choice = {};
    choice.grads = entries;
    choice.outs = entries + num_grads + static_cast<int64_t>(job.weights.size());
    choice.num_grads = num_grads;
    choice.acc = job.acc.bytes();
    choice.values = selection.values.bytes();
    choice.indices = selection.indices;
    choice.thresholds = selection.thresholds;
    choice.finite = finite;
    choice.missed = selection.missed;
    choice.num_missed = selection.num_missed;
    choice.largest = selection.largest;
    choice.not_finite = reinterpret_cast<bool*>(memory + layout.not_finite);
    if (job.acc.dtype == DType::kF32) {
        choice.marks = {reinterpret_cast<uint32_t*>(memory + layout.marks), selection.thresholds};
    }
    choice.shift = shift_of(job.acc);
    choice.records = reinterpret_cast<Record*>(memory + layout.records);
    choice.slots = reinterpret_cast<uint32_t*>(memory + layout.slots);
    choice.edges = memory + layout.edges;
    choice.words = reinterpret_cast<uint32_t*>(memory + layout.words);
    choice.list_keys = memory + layout.keys;
    choice.list_indices = reinterpret_cast<uint32_t*>(memory + layout.indices);
    return choice;
}

template <class T>
void run(const Accumulation& job, Scale scale, const Layout& layout, Choice choice, char* memory, Stream stream) {
    const int resident = device::max_resident_blocks<select_kernel<T>>("sparsify");
    // With marks, all steps but the first read a bit per element, and the candidates; unless a threshold misses.
    constexpr int kPerMultiprocessor = std::is_same_v<T, float> ? 1 : 2;
    const int64_t blocks = blocks_for_selection(job.acc.count, job.acc.device, resident, kPerMultiprocessor);
    choice.num_records = static_cast<int>(Layout::records_for(choice.num_grads, blocks));
    static_assert(sizeof(Record) % 16 == 0);
    bool* const not_finite = reinterpret_cast<bool*>(memory + layout.not_finite);
    const Zeros records{memory + layout.records, choice.num_records * int64_t{sizeof(Record)}};
    accumulate_pass(job, choice.grads, scale, {not_finite, true, records, choice.largest}, choice.marks,
                    reinterpret_cast<uint32_t*>(memory + layout.counter), memory + layout.clipping, stream);
    device::launch_together<select_kernel<T>>("sparsify", blocks, stream, choice);
}

}  // namespace

int64_t sparsify_workspace_bytes(const Accumulation& job, const Selection& selection) {
    return Layout(job, selection).num_bytes;
}

void sparsify(const Accumulation& job, Scale scale, const Selection& selection, bool* finite, Workspace& workspace,
              Stream stream) {
    if (job.acc.count == 0) {
        device::fill_bytes(finite, 1, static_cast<int64_t>(job.grads.size()), stream);
        device::fill_bytes(selection.missed, 0, static_cast<int64_t>(job.grads.size()), stream);
        if (selection.largest != nullptr) device::fill_bytes(selection.largest, 0, sizeof(float), stream);
        return;
    }
    const Layout layout(job, selection);
    std::vector<Buffer> arrays = arrays_of(job);
    for (int64_t count : selection.counts) arrays.push_back({nullptr, count, job.acc.dtype});
    const Zeros zeros{workspace.memory + layout.counter, layout.records - layout.counter};
    const Entry* entries = upload(arrays, workspace, stream, zeros).entries;
    const Choice choice = choice_of(job, selection, layout, entries, finite, workspace.memory);
    if (job.acc.dtype == DType::kF64) return run<double>(job, scale, layout, choice, workspace.memory, stream);
    run<float>(job, scale, layout, choice, workspace.memory, stream);
}

}  // namespace pycomm::cuda
