#include "kernels/step.h"

#include <cmath>

#include "device/launch.h"
#include "kernels/cuda/sums.h"

namespace pycomm::cuda {
namespace {

// The arithmetic of rules.h, with the CPU's bits: this is compiled without fused multiply-adds, and quotients and roots
// are correctly rounded by default.
template <class T>
struct Numbers {
    using Value = T;
    PYCOMM_HOST_DEVICE T of(double x) { return static_cast<T>(x); }
    PYCOMM_HOST_DEVICE T add(T a, T b) { return a + b; }
    PYCOMM_HOST_DEVICE T sub(T a, T b) { return a - b; }
    PYCOMM_HOST_DEVICE T mul(T a, T b) { return a * b; }
    PYCOMM_HOST_DEVICE T div(T a, T b) { return a / b; }
    PYCOMM_HOST_DEVICE T root(T a) { return std::sqrt(a); }
    PYCOMM_HOST_DEVICE T maximum(T a, T b) { return a != a || a > b ? a : b; }
};

// Values, because the functions of rules.h exist on the host only.
template <Rule kRule>
inline constexpr bool kReadsGrads = reads_grads(kRule);
template <Rule kRule>
inline constexpr bool kWritesStates = writes_states(kRule);
template <Rule kRule>
inline constexpr bool kWritesWeights = writes_weights(kRule);

// Entries by parameter; null where there are no such arrays.
template <class V>
struct Pass {
    Table weights;
    const Entry* grads;
    const Entry* copies;
    const Entry* states[kMostStates];
    Constants<Numbers<V>> constants;
    Scale scale;
    const double* rates;
    Sums<2>* slots;  // of squares
    const float* found;
    const BiasCorrections* corrections;  // by parameter; null: in the constants
};

PYCOMM_DEVICE bool is_off(const float* found) { return found != nullptr && *found != 0.0f; }

// One thread for each parameter. The counts are single numbers, so that entries[j] is parameter j's.
PYCOMM_KERNEL count_kernel(Table counts, Coefficients coefficients, bool adds, const float* found,
                           BiasCorrections* out) {
    int64_t j = device::block_index() * device::num_threads() + device::thread_index();
    if (j >= counts.count || is_off(found)) return;
    auto count = reinterpret_cast<float*>(counts.entries[j].data);
    if (adds) *count += 1.0f;
    out[j] = bias_corrections(coefficients, *count, [](double x) { return std::sqrt(x); });
}

// One parameter.
template <class V>
struct Parameter {
    char* weights;
    const char* grads;
    char* copies;
    char* states[kMostStates];
    bool has[kMostStates];
    DType grad_dtype, copy_dtype;
    bool aligned;  // all arrays, so that their packets move in one access
    V rate;

    PYCOMM_MEMBER Parameter(const Pass<V>& pass, const Entry& entry) {
        auto j = &entry - pass.weights.entries;
        weights = entry.data;
        grads = pass.grads == nullptr ? nullptr : pass.grads[j].data;
        grad_dtype = pass.grads == nullptr ? DType::kF32 : pass.grads[j].dtype;
        copies = pass.copies == nullptr ? nullptr : pass.copies[j].data;
        copy_dtype = pass.copies == nullptr ? DType::kF16 : pass.copies[j].dtype;
        for (int s = 0; s < kMostStates; ++s) {
            has[s] = pass.states[s] != nullptr;
            states[s] = has[s] ? pass.states[s][j].data : nullptr;
        }
        constexpr int kPerPacket = 16 / sizeof(V);
        uintptr_t bits = bits_below(weights, 16) | bits_below(copies, kPerPacket * sizeof(F16));
        with_float_type(grad_dtype, [&](auto* type) { bits |= bits_below(grads, kPerPacket * sizeof(*type)); });
        for (int s = 0; s < kMostStates; ++s) bits |= bits_below(states[s], 16);
        aligned = bits == 0;
        rate = static_cast<V>(pass.rates == nullptr ? 1.0 : pass.rates[j]);
    }

    // 0 where a pointer, or null, is a multiple of `size`, a power of two.
    PYCOMM_MEMBER static uintptr_t bits_below(const char* pointer, uintptr_t size) {
        return reinterpret_cast<uintptr_t>(pointer) & (size - 1);
    }
};

// The part of a packet's elements that this thread works on.
struct Places {
    int64_t first;   // of the packet, in the array
    int begin, end;  // of its elements
    bool whole;      // all of them, in arrays where they move in one access

    PYCOMM_MEMBER bool has(int e) const { return e >= begin && e < end; }
};

// One by one; what is not this thread's becomes 0. Arrays are aligned to their elements.
template <class T, int kCount>
PYCOMM_DEVICE Packet<T, kCount> load_some(const char* base, const Places& places) {
    auto from = reinterpret_cast<const T*>(base) + places.first;
    Packet<T, kCount> out = {};
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
        if (places.has(e)) out.values[e] = from[e];
    }
    return out;
}

template <class T, int kCount>
PYCOMM_DEVICE Packet<T, kCount> load_whole(const char* base, const Places& places) {
    return *reinterpret_cast<const Packet<T, kCount>*>(reinterpret_cast<const T*>(base) + places.first);
}

template <class T, int kCount>
PYCOMM_DEVICE void store_places(char* base, const Places& places, const Packet<T, kCount>& packet) {
    auto to = reinterpret_cast<T*>(base) + places.first;
    if (places.whole) {
        *reinterpret_cast<Packet<T, kCount>*>(to) = packet;
        return;
    }
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
        if (places.has(e)) to[e] = packet.values[e];
    }
}

// A packet on its way through a step.
template <Rule kRule, class V>
struct Elements {
    static constexpr int kCount = 16 / sizeof(V);
    Packet<V, kCount> weights, grads, states[kMostStates];

    // Whole packets have a branch of their own, in which all loads are under way before any is waited for.
    PYCOMM_MEMBER void load(const Parameter<V>& parameter, const Places& places) {
        if (places.whole) {
            load<true>(parameter, places);
        } else {
            load<false>(parameter, places);
        }
    }

    // Gradients come last: the branch for their type also converts them, and that waits for them.
    template <bool kWhole>
    PYCOMM_MEMBER void load(const Parameter<V>& parameter, const Places& places) {
        weights = load_values<V, kWhole>(parameter.weights, places);
#pragma unroll
        for (int s = 0; s < kMostStates; ++s) {
            if (parameter.has[s]) states[s] = load_values<V, kWhole>(parameter.states[s], places);
        }
        if constexpr (kReadsGrads<kRule>) {
            with_float_type(parameter.grad_dtype, [&](auto* type) {
                using Grad = std::remove_pointer_t<decltype(type)>;
                auto packet = load_values<Grad, kWhole>(parameter.grads, places);
#pragma unroll
                for (int e = 0; e < kCount; ++e) grads.values[e] = static_cast<V>(widen(packet.values[e]));
            });
        }
    }

    template <class T, bool kWhole>
    PYCOMM_MEMBER static Packet<T, kCount> load_values(const char* base, const Places& places) {
        return kWhole ? load_whole<T, kCount>(base, places) : load_some<T, kCount>(base, places);
    }

    PYCOMM_MEMBER void update(const Constants<Numbers<V>>& constants, const Parameter<V>& parameter,
                              const Places& places, Sums<2>& squares) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
            V weight = weights.values[e];
            Element<Numbers<V>> x{weight, grads.values[e], {}, V{}};
#pragma unroll
            for (int s = 0; s < kMostStates; ++s) x.states[s] = states[s].values[e];
            Update<kRule, Numbers<V>>::apply(constants, parameter.has, parameter.rate, x);
            weights.values[e] = x.weight;
#pragma unroll
            for (int s = 0; s < kMostStates; ++s) states[s].values[e] = x.states[s];
            if (kRule == Rule::kLambMoments && places.has(e)) {
                squares.values[0] += static_cast<double>(weight) * static_cast<double>(weight);
                squares.values[1] += static_cast<double>(x.direction) * static_cast<double>(x.direction);
            }
        }
    }

    PYCOMM_MEMBER void store(const Parameter<V>& parameter, const Places& places) const {
        if constexpr (kWritesStates<kRule>) {
#pragma unroll
            for (int s = 0; s < kMostStates; ++s) {
                if (parameter.has[s]) store_places<V, kCount>(parameter.states[s], places, states[s]);
            }
        }
        if constexpr (kWritesWeights<kRule>) {
            store_places<V, kCount>(parameter.weights, places, weights);
            if (parameter.copies == nullptr) return;
            if (parameter.copy_dtype == DType::kF16) {
                store_copies<F16>(parameter, places);
            } else {
                store_copies<BF16>(parameter, places);
            }
        }
    }

    template <class Half>
    PYCOMM_MEMBER void store_copies(const Parameter<V>& parameter, const Places& places) const {
        Packet<Half, kCount> halves;
#pragma unroll
        for (int e = 0; e < kCount; ++e) halves.values[e] = narrow<Half>(weights.values[e]);
        store_places<Half, kCount>(parameter.copies, places, halves);
    }
};

// Elements [from, from + count). Packets lie as in norms.cu; those at the ends may be partial.
template <Rule kRule, class V>
PYCOMM_DEVICE Sums<2> step_segment(const Constants<Numbers<V>>& constants, const Parameter<V>& parameter, int64_t from,
                                   int64_t count, Share share) {
    constexpr int kCount = Elements<kRule, V>::kCount;
    Sums<2> squares = {};
    int64_t end = from + count;
    // A step's many arrays keep enough loads under way; unrolled, this would be ten times as long.
#pragma unroll 1
    for (int64_t at = from / kCount * kCount + share.first * kCount; at < end; at += share.stride * kCount) {
        Places places{at, at < from ? static_cast<int>(from - at) : 0,
                      end - at < kCount ? static_cast<int>(end - at) : kCount, false};
        places.whole = parameter.aligned && places.begin == 0 && places.end == kCount;
        Elements<kRule, V> elements = {};
        elements.load(parameter, places);
        elements.update(constants, parameter, places, squares);
        elements.store(parameter, places);
    }
    return squares;
}

// Blocks per multiprocessor: as many as there are registers for.
constexpr int blocks_of(Rule rule, size_t itemsize) {
    return itemsize == 8 && (rule == Rule::kAdam || rule == Rule::kLambMoments) ? 2 : 3;
}

template <Rule kRule, class V>
PYCOMM_KERNEL_OF((blocks_of(kRule, sizeof(V))))
step_kernel(Pass<V> pass) {
    if (is_off(pass.found)) return;
    Constants<Numbers<V>> constants = pass.constants;
    const Factor scale(pass.scale);
    for_segments(pass.weights, [&](const Entry& entry, int64_t from, int64_t, int64_t count, Share share) {
        Parameter<V> parameter(pass, entry);
        constants.scale = scale.as<V>();
        if (pass.corrections != nullptr) {
            const BiasCorrections& corrections = pass.corrections[&entry - pass.weights.entries];
            constants.inverse_bias_correction1 = static_cast<V>(corrections.inverse1);
            constants.inverse_sqrt_bias_correction2 = static_cast<V>(corrections.inverse_sqrt2);
        }
        Sums<2> squares = step_segment<kRule>(constants, parameter, from, count, share);
        if constexpr (kRule == Rule::kLambMoments) {
            store_sums(pass.weights, entry, share, squares, pass.slots);
        }
    });
}

// The table of a step: the arrays of one kind after the other, weights first.
std::vector<Buffer> arrays_of(const Step& job) {
    std::vector<Buffer> arrays = job.weights;
    arrays.insert(arrays.end(), job.grads.begin(), job.grads.end());
    arrays.insert(arrays.end(), job.copies.begin(), job.copies.end());
    for (const auto& states : job.states) arrays.insert(arrays.end(), states.begin(), states.end());
    arrays.insert(arrays.end(), job.counts.begin(), job.counts.end());
    return arrays;
}

template <class V>
Pass<V> pass_of(const Step& job, Scale scale, const Entry* entries) {
    int64_t total = 0;
    for (const Buffer& weight : job.weights) total += weight.count;
    const Entry* next = entries;
    auto take = [&](const std::vector<Buffer>& arrays) {
        const Entry* begin = arrays.empty() ? nullptr : next;
        next += arrays.size();
        return begin;
    };
    Pass<V> pass = {};
    pass.weights = {take(job.weights), static_cast<int>(job.weights.size()), total};
    pass.grads = take(job.grads);
    pass.copies = take(job.copies);
    for (int s = 0; s < kMostStates; ++s) pass.states[s] = take(job.states[s]);
    pass.constants = Constants<Numbers<V>>::of(job.coefficients, scale.value);
    pass.scale = scale;
    pass.rates = job.rates;
    pass.found = job.found;
    return pass;
}

// Behind the slots of squares.
int64_t slot_bytes_of(const Step& job) { return job.rule == Rule::kLambMoments ? slot_bytes<2>(job.weights) : 0; }

// `counts`: the last entries of the table.
const BiasCorrections* launch_counts(const Step& job, const Entry* counts, char* memory, Stream stream) {
    if (job.counts.empty()) return nullptr;
    auto corrections = reinterpret_cast<BiasCorrections*>(memory);
    auto count = static_cast<int>(job.counts.size());
    device::launch<count_kernel>("step counts", blocks_for(count, device::threads_per_block()), stream,
                                 Table{counts, count, count}, job.coefficients, counts_steps(job.rule), job.found,
                                 corrections);
    return corrections;
}

template <Rule kRule, class V>
void launch_step(const Step& job, const Pass<V>& pass, Stream stream) {
    if (pass.weights.total > 0) {
        device::launch<step_kernel<kRule, V>>("step", blocks_for(pass.weights.total, kTile), stream, pass);
    }
    if (kRule == Rule::kLambMoments && job.squares != nullptr) {
        add_up("step", pass.weights, pass.slots, job.squares, stream);
    }
}

template <class V>
void step_of(const Step& job, Scale scale, Workspace& workspace, Stream stream) {
    std::vector<Buffer> arrays = arrays_of(job);
    const Entry* entries = upload(arrays, workspace, stream).entries;
    auto pass = pass_of<V>(job, scale, entries);
    char* memory = workspace.memory + table_bytes(arrays.size());
    pass.slots = reinterpret_cast<Sums<2>*>(memory);
    pass.corrections =
        launch_counts(job, entries + arrays.size() - job.counts.size(), memory + slot_bytes_of(job), stream);
    switch (job.rule) {
        case Rule::kMomentum:
            return launch_step<Rule::kMomentum>(job, pass, stream);
        case Rule::kAdam:
            return launch_step<Rule::kAdam>(job, pass, stream);
        case Rule::kRmsprop:
            return launch_step<Rule::kRmsprop>(job, pass, stream);
        case Rule::kAdagrad:
            return launch_step<Rule::kAdagrad>(job, pass, stream);
        case Rule::kLambMoments:
            return launch_step<Rule::kLambMoments>(job, pass, stream);
        case Rule::kLambApply:
            return launch_step<Rule::kLambApply>(job, pass, stream);
    }
}

}  // namespace

int64_t step_workspace_bytes(const Step& job) {
    auto corrections = static_cast<int64_t>(job.counts.size() * sizeof(BiasCorrections));
    return table_bytes(arrays_of(job).size()) + slot_bytes_of(job) + corrections;
}

void step(const Step& job, Scale scale, Workspace& workspace, Stream stream) {
    if (job.weights.empty()) return;
    if (job.weights[0].dtype == DType::kF64) return step_of<double>(job, scale, workspace, stream);
    step_of<float>(job, scale, workspace, stream);
}

}  // namespace pycomm::cuda
