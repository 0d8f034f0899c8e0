// A warp takes a chunk of consecutive elements, four packets of 16 bytes of every flat array per lane. Most chunks lie
// within one gradient; in the others every lane looks for the gradient of its packets.
#include "kernels/accumulate.h"

#include "device/launch.h"
#include "kernels/cuda/accumulate_pass.h"
#include "kernels/cuda/grid.h"
#include "kernels/topk.h"

namespace pycomm::cuda {
namespace {

struct Pass {
    Table grads;
    const Entry* weights;  // null: none
    const float* factors;
    Scale scale;
    double decay;
    char* acc;
    const char* residual;
    char* velocity;
    const char* old_velocity;
    float momentum;
    bool nesterov;
    Findings findings;
    Marks marks;
    int64_t shift;
};

template <class Acc>
struct Gradient {
    int number;
    int64_t begin, end;  // in the flat arrays
    const char* grads;
    const char* weights;
    Acc scale;
    uint32_t limit;  // magnitudes whose bits are above it are marked

    PYCOMM_MEMBER Gradient(const Pass& pass, int j) : number(j) {
        begin = pass.grads.entries[j].begin;
        end = pass.grads.entries[j + 1].begin;
        grads = pass.grads.entries[j].data;
        weights = pass.weights == nullptr ? nullptr : pass.weights[j].data;
        auto of_all = factor_of<double>(pass.scale);
        scale = static_cast<Acc>(pass.factors == nullptr ? of_all : of_all * static_cast<double>(pass.factors[j]));
        limit = 0xffffffffu;
        if (pass.marks.words == nullptr) return;
        float threshold = pass.marks.thresholds[j];
        if (threshold > 0.0f && is_finite(threshold)) limit = device::bits_of(kThresholdHint * threshold);
    }
};

// Operands of kCount sums.
template <class Acc, class Grad, int kCount>
struct Terms {
    Packet<Grad, kCount> grads, weights;
    Packet<Acc, kCount> residual, velocity;

    // kAligned: packets move as one.
    template <bool kAligned>
    PYCOMM_MEMBER void load(const Pass& pass, const Gradient<Acc>& gradient, int64_t at) {
        grads = packet_at<kAligned, Grad>(gradient.grads, at - gradient.begin);
        if (gradient.weights != nullptr) weights = packet_at<kAligned, Grad>(gradient.weights, at - gradient.begin);
        if (pass.residual != nullptr) residual = packet_at<kAligned, Acc>(pass.residual, at);
        if (pass.old_velocity != nullptr) velocity = packet_at<kAligned, Acc>(pass.old_velocity, at);
    }

    template <bool kAligned, class T>
    PYCOMM_MEMBER static Packet<T, kCount> packet_at(const char* base, int64_t i) {
        if constexpr (kAligned) {
            return *reinterpret_cast<const Packet<T, kCount>*>(base + i * static_cast<int64_t>(sizeof(T)));
        } else {
            return load_packet<T, kCount>(base, i);
        }
    }

    // The sum of element e; velocity becomes the new one.
    PYCOMM_MEMBER Acc sum(const Pass& pass, const Gradient<Acc>& gradient, int e) {
        Acc g = static_cast<Acc>(widen(grads.values[e])) * gradient.scale;
        if (gradient.weights != nullptr) {
            g = g + static_cast<Acc>(widen(weights.values[e])) * static_cast<Acc>(pass.decay);
        }
        if (pass.velocity == nullptr) return pass.residual == nullptr ? g : residual.values[e] + g;
        auto momentum = static_cast<Acc>(pass.momentum);
        Acc u = pass.nesterov ? momentum * (velocity.values[e] + g) : momentum * velocity.values[e] + g;
        velocity.values[e] = u;
        Acc out = pass.residual == nullptr ? u : residual.values[e] + u;
        return pass.nesterov ? out + g : out;
    }

    // Writes them; returns which of them are marked.
    PYCOMM_MEMBER uint32_t finish(const Pass& pass, const Gradient<Acc>& gradient, int64_t at) {
        Packet<Acc, kCount> sums;
        uint32_t marked = 0;
        bool all = true;
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
            sums.values[e] = sum(pass, gradient, e);
            all = all && is_finite(sums.values[e]);
            if constexpr (std::is_same_v<Acc, float>) {
                uint32_t magnitude = device::bits_of(sums.values[e]) & 0x7fffffffu;
                marked |= static_cast<uint32_t>(magnitude > gradient.limit) << e;
            }
        }
        store_packet<Acc, kCount>(pass.acc, at, sums);
        if (pass.velocity != nullptr) store_packet<Acc, kCount>(pass.velocity, at, velocity);
        if (!all) pass.findings.answers[gradient.number] = pass.findings.when_not_finite;
        return marked;
    }
};

// Elements [at, at + kCount), possibly of several gradients; `gradient` is one at or before the first.
template <class Acc, class Grad, int kCount>
PYCOMM_DEVICE uint32_t mixed_packet(const Pass& pass, Gradient<Acc>& gradient, int64_t at) {
    auto reach = [&](int64_t position) {
        int j = gradient.number;
        while (pass.grads.entries[j + 1].begin <= position) ++j;
        if (j != gradient.number) gradient = Gradient<Acc>(pass, j);
    };
    if (at >= 0 && at < pass.grads.total) reach(at);
    if (at >= 0 && at + kCount <= gradient.end) {
        Terms<Acc, Grad, kCount> terms = {};
        terms.template load<false>(pass, gradient, at);
        return terms.finish(pass, gradient, at);
    }
    uint32_t marked = 0;
    for (int e = 0; e < kCount; ++e) {
        if (at + e < 0 || at + e >= pass.grads.total) continue;
        reach(at + e);
        Terms<Acc, Grad, 1> terms = {};
        terms.template load<false>(pass, gradient, at + e);
        marked |= terms.finish(pass, gradient, at + e) << e;
    }
    return marked;
}

// Whether element `at` lies on a border of packets in all arrays.
template <class Acc, class Grad, int kCount>
PYCOMM_DEVICE bool is_aligned(const Pass& pass, const Gradient<Acc>& gradient, int64_t at) {
    auto of_grads = [&](const char* array) {
        return reinterpret_cast<uintptr_t>(array) +
               static_cast<uintptr_t>((at - gradient.begin) * int64_t{sizeof(Grad)});
    };
    auto of_sums = [&](const char* array) {
        return reinterpret_cast<uintptr_t>(array) + static_cast<uintptr_t>(at * int64_t{sizeof(Acc)});
    };
    uintptr_t grads = of_grads(gradient.grads), sums = of_sums(pass.acc);
    if (gradient.weights != nullptr) grads |= of_grads(gradient.weights);
    if (pass.residual != nullptr) sums |= of_sums(pass.residual);
    if (pass.velocity != nullptr) sums |= of_sums(pass.velocity);
    if (pass.old_velocity != nullptr) sums |= of_sums(pass.old_velocity);
    return grads % sizeof(Packet<Grad, kCount>) == 0 && sums % sizeof(Packet<Acc, kCount>) == 0;
}

// A chunk of one gradient.
template <bool kAligned, class Acc, class Grad, int kCount>
PYCOMM_DEVICE void whole_rows(const Pass& pass, const Gradient<Acc>& gradient, int64_t first,
                              uint32_t (&marked)[kRows]) {
    Terms<Acc, Grad, kCount> terms[kRows] = {};  // all loads first, so that they are under way together
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        terms[r].template load<kAligned>(pass, gradient, first + r * device::kWarpSize * kCount);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        marked[r] = terms[r].finish(pass, gradient, first + r * device::kWarpSize * kCount);
    }
}

template <class Acc, class Grad>
PYCOMM_KERNEL accumulate_kernel(Pass pass) {
    constexpr int kCount = 16 / sizeof(Acc);
    constexpr int kElems = kRows * device::kWarpSize * kCount;
    if (pass.findings.largest != nullptr && thread_of_grid() == 0) *pass.findings.largest = 0.0f;
    clear(pass.findings.zeros, thread_of_grid(), threads_of_grid());
    int warp = device::thread_index() / device::kWarpSize, warps = device::num_threads() / device::kWarpSize;
    int64_t chunk = static_cast<int64_t>(device::block_index()) * warps + warp;
    int64_t begin = chunk * kElems - pass.shift;
    if (begin >= pass.grads.total) return;  // the whole warp
    Gradient<Acc> gradient(pass, array_at(pass.grads, begin > 0 ? begin : 0));
    int64_t first = begin + device::thread_index() % device::kWarpSize * kCount;
    uint32_t marked[kRows];
    if (begin >= 0 && begin + kElems <= gradient.end) {
        if (is_aligned<Acc, Grad, kCount>(pass, gradient, begin)) {
            whole_rows<true, Acc, Grad, kCount>(pass, gradient, first, marked);
        } else {
            whole_rows<false, Acc, Grad, kCount>(pass, gradient, first, marked);
        }
    } else {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            marked[r] = mixed_packet<Acc, Grad, kCount>(pass, gradient, first + r * device::kWarpSize * kCount);
        }
    }
    if constexpr (std::is_same_v<Acc, float>) {
        if (pass.marks.words != nullptr) write_words(marked, pass.marks.words + chunk * kChunkWords, kChunkWords);
    }
}

}  // namespace

void accumulate_pass(const Accumulation& job, const Entry* entries, Scale scale, Findings findings, Marks marks,
                     uint32_t* counter, char* scratch, Stream stream) {
    if (job.acc.count == 0) return;
    const auto num_grads = static_cast<int>(job.grads.size());
    const Table grads{entries, num_grads, job.acc.count};
    float* factors = nullptr;
    if (job.clip != 0.0) {
        factors = reinterpret_cast<float*>(scratch);
        char* slots = scratch + round_up(num_grads * int64_t{sizeof(float)});
        clip_pass(grads, scale, {job.clip, counter, factors, reinterpret_cast<Sums<1>*>(slots)}, stream);
    }
    Pass pass{grads,
              job.weights.empty() ? nullptr : entries + num_grads,
              factors,
              scale,
              job.decay,
              job.acc.bytes(),
              static_cast<const char*>(job.residual),
              static_cast<char*>(job.velocity),
              static_cast<const char*>(job.old_velocity),
              job.momentum,
              job.nesterov,
              findings,
              marks,
              shift_of(job.acc)};
    with_float_type(job.grads[0].dtype, [&](auto* type) {
        using Grad = std::remove_pointer_t<decltype(type)>;
        using Acc = Wide<Grad>;
        int64_t per_block = device::threads_per_block() * int64_t{kRows * 16 / sizeof(Acc)};
        device::launch<accumulate_kernel<Acc, Grad>>("accumulate", blocks_for(job.acc.count + pass.shift, per_block),
                                                     stream, pass);
    });
}

int64_t accumulate_workspace_bytes(const Accumulation& job) {
    int64_t table = table_bytes(job.grads.size() + job.weights.size());
    return job.clip == 0.0 ? table : round_up(table) + 256 + clipping_bytes(job);
}

void accumulate(const Accumulation& job, Scale scale, bool* finite, Workspace& workspace, Stream stream) {
    const std::vector<Buffer> arrays = arrays_of(job);
    char* const behind = workspace.memory + round_up(table_bytes(arrays.size()));  // a counter, and more
    const Table table = upload(arrays, workspace, stream, job.clip == 0.0 ? Zeros{} : Zeros{behind, 16});
    device::fill_bytes(finite, 1, static_cast<int64_t>(job.grads.size()), stream);
    accumulate_pass(job, table.entries, scale, {finite, false}, {}, reinterpret_cast<uint32_t*>(behind), behind + 256,
                    stream);
}

}  // namespace pycomm::cuda
