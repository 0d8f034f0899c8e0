#include "kernels/cpu/loops/candidates.h"
#include "kernels/cpu/loops/members.h"

namespace pycomm::PYCOMM_ISA {
namespace {

// Arithmetic of one element, written once for floats in vectors and for single doubles.
template <class V, class Add, class Mul>
inline V corrected(const Terms& terms, V g, V weight, V residual, V velocity, V scale, V decay, V momentum, V* out,
                   Add&& plus, Mul&& times) {
    g = times(g, scale);
    if (terms.weight != nullptr) g = plus(g, times(weight, decay));
    if (terms.velocity == nullptr) return terms.residual == nullptr ? g : plus(residual, g);
    V u = terms.nesterov ? times(momentum, plus(velocity, g)) : plus(times(momentum, velocity), g);
    *out = u;
    V sum = terms.residual == nullptr ? u : plus(residual, u);
    return terms.nesterov ? plus(sum, g) : sum;
}

constexpr int64_t kFourVecs = 4 * kLanes;
constexpr int64_t kPageFloats = 4096 / sizeof(float);
#if defined(PYCOMM_ISA_AVX512)
constexpr int64_t kSumsDistance = 1024;  // bytes
#else
constexpr int64_t kSumsDistance = 384;  // a kilobyte takes 7 % longer (measured on Zen 3)
#endif

// Appends the lanes of four vectors that `hits` name.
inline void append(Collector& collector, const Vec (&v)[4], const uint32_t (&hits)[4], int64_t at) {
    if (collector.count + kCollectSlack > collector.capacity) {
        collector.full = true;
        return;
    }
    for (int u = 0; u < 4; ++u) {
        collector.count += put_candidates(collector.list + collector.count, v[u], hits[u],
                                          collector.first_index + static_cast<uint32_t>(at + u * kLanes));
    }
}

// The arrays of one range, typed; absent ones are null.
template <class Grad>
struct Arrays {
    const Grad *grad, *weight;
    const float *residual, *old_velocity;
    float *acc, *velocity;

    explicit Arrays(const Terms& terms)
        : grad(static_cast<const Grad*>(terms.grad)),
          weight(static_cast<const Grad*>(terms.weight)),
          residual(static_cast<const float*>(terms.residual)),
          old_velocity(static_cast<const float*>(terms.old_velocity)),
          acc(static_cast<float*>(terms.acc)),
          velocity(static_cast<float*>(terms.velocity)) {}

    void prefetch(int64_t i) const {
        prefetch_ahead<kSumsDistance>(grad + i, kFourVecs);
        if (residual != nullptr) prefetch_ahead<kSumsDistance>(residual + i, kFourVecs);
        if (old_velocity != nullptr) prefetch_ahead<kSumsDistance>(old_velocity + i, kFourVecs);
    }

    // How many elements precede a cache line border of both outputs; -1 if they never meet one together.
    int64_t head() const {
        int64_t n = elements_before_line(acc);
        return velocity == nullptr || n == elements_before_line(velocity) ? n : -1;
    }
};

// Every branch in here depends on `terms` alone. The compiler knows the terms of the usual step, which has a residual
// and a velocity, but no weight and not Nesterov's momentum: there, branches take longer than memory does.
template <class Grad>
class FloatAccumulation {
   public:
    FloatAccumulation(const Terms& terms, Collector* collector)
        : terms_(terms),
          a_(terms),
          collector_(collector),
          scale_(splat(static_cast<float>(terms.scale))),
          decay_(splat(static_cast<float>(terms.decay))),
          momentum_(splat(terms.momentum)),
          limit_(splat(collector == nullptr ? 0.0f : collector->limit)),
          finite_(overflow_limit<float>()) {}

    bool run(Store mode) { return is_usual() ? run_as<true>(mode) : run_as<false>(mode); }

   private:
    static constexpr int kPerLine = 16 / kLanes;

    bool is_usual() const {
        return terms_.weight == nullptr && terms_.residual != nullptr && terms_.velocity != nullptr &&
               terms_.old_velocity != nullptr && !terms_.nesterov;
    }

    template <bool kUsual>
    bool run_as(Store mode) {
        int64_t i = 0, head = mode == Store::kStreaming ? a_.head() : -1;
        if (head >= 0 && head + kFourVecs <= terms_.count) {
            partly(i, head);
            for (; i + kFourVecs <= terms_.count; i += kFourVecs) four<true, kUsual>(i);
        }
        for (; i + kFourVecs <= terms_.count; i += kFourVecs) four<false, kUsual>(i);
        partly(i, terms_.count);
        return finite_.all();
    }

    Vec one(Vec g, Vec w, Vec r, Vec u, Vec* velocity) {
        Vec v = corrected(terms_, g, w, r, u, scale_, decay_, momentum_, velocity, add, mul);
        finite_.check(v);
        return v;
    }

    template <bool kStream, bool kUsual>
    void four(int64_t i) {
        if (kUsual && !is_usual()) __builtin_unreachable();
        if (kUsual && (a_.weight != nullptr || a_.residual == nullptr)) __builtin_unreachable();
        if (kUsual && (a_.velocity == nullptr || a_.old_velocity == nullptr)) __builtin_unreachable();
        const Vec zero = splat(0.0f);
        Vec v[4], velocity[4];
        uint32_t hits[4] = {};
        a_.prefetch(i);
        for (int u = 0; u < 4; ++u) {
            int64_t at = i + u * kLanes;
            velocity[u] = zero;
            v[u] = one(load(a_.grad + at), a_.weight == nullptr ? zero : load(a_.weight + at),
                       a_.residual == nullptr ? zero : load(a_.residual + at),
                       a_.old_velocity == nullptr ? zero : load(a_.old_velocity + at), &velocity[u]);
        }
        // Line by line: two streams that take turns within a line cost a tenth (measured on Zen 3).
        for (int line = 0; line < 4; line += kPerLine) {
            write<kStream>(a_.acc + i, v, line);
            if (a_.velocity != nullptr) write<kStream>(a_.velocity + i, velocity, line);
        }
        if (collector_ == nullptr) return;
        for (int u = 0; u < 4; ++u) hits[u] = not_at_most(magnitude(v[u]), limit_);
        if ((hits[0] | hits[1] | hits[2] | hits[3]) == 0) return;
        append(*collector_, v, hits, i);
    }

    template <bool kStream>
    static void write(float* to, const Vec (&v)[4], int line) {
        for (int u = line; u < line + kPerLine; ++u) {
            kStream ? stream(to + u * kLanes, v[u]) : store(to + u * kLanes, v[u]);
        }
    }

    // The elements from i to end, in vectors that need not be whole.
    void partly(int64_t& i, int64_t end) {
        const Vec zero = splat(0.0f);
        for (int64_t n; i < end; i += n) {
            n = end - i < kLanes ? end - i : kLanes;
            Vec velocity = zero;
            Vec v = one(load_partial(a_.grad + i, n), a_.weight == nullptr ? zero : load_partial(a_.weight + i, n),
                        a_.residual == nullptr ? zero : load_partial(a_.residual + i, n),
                        a_.old_velocity == nullptr ? zero : load_partial(a_.old_velocity + i, n), &velocity);
            store_partial(a_.acc + i, v, n);
            if (a_.velocity != nullptr) store_partial(a_.velocity + i, velocity, n);
            // Lanes beyond a partial vector's end are zero, and no limit is below zero.
            if (collector_ != nullptr) append(*collector_, {v}, {not_at_most(magnitude(v), limit_)}, i);
        }
    }

    const Terms& terms_;
    const Arrays<Grad> a_;
    Collector* const collector_;
    const Vec scale_, decay_, momentum_, limit_;
    Finite finite_;
};

// Whether loads of `in` wait for stores to `out` that came shortly before: a processor compares the 12 lowest bits of
// their addresses first. That takes four times as long for a range (measured on Zen 3).
bool waits_for(const void* in, const void* out) {
    auto ahead = (reinterpret_cast<uintptr_t>(out) - reinterpret_cast<uintptr_t>(in)) % 4096;
    return in != nullptr && out != nullptr && ahead > 0 && ahead <= 512;
}

// Copies of a page's worth of gradient and weight, which lie to a page as acc does.
class Beside {
   public:
    const void* of(const float* from, int64_t count, int array, const float* acc) {
        float* to = pages_[array] + reinterpret_cast<uintptr_t>(acc) % 4096 / sizeof(float);
        int64_t i = 0;
        for (; i + kFourVecs <= count; i += kFourVecs) {
            prefetch_ahead<kSumsDistance>(from + i, kFourVecs);
            for (int u = 0; u < 4; ++u) store(to + i + u * kLanes, load(from + i + u * kLanes));
        }
        for (; i < count; ++i) to[i] = bits_float(load_element<uint32_t>(reinterpret_cast<const char*>(from), i));
        return to;
    }

   private:
    alignas(4096) float pages_[2][kPageFloats];
};

bool accumulate_floats(const Terms& terms, Store store, Collector* collector) {
    const Arrays<float> a(terms);
    auto held_up = [&](const float* in) { return waits_for(in, a.acc) || waits_for(in, a.velocity); };
    const bool grads = held_up(a.grad), weights = held_up(a.weight);
    if (store == Store::kCached || a.head() < 0 || !(grads || weights)) {
        return FloatAccumulation<float>(terms, collector).run(store);
    }
    Beside beside;
    bool finite = true;
    uint32_t first = collector == nullptr ? 0 : collector->first_index;
    for (int64_t i = 0, n; i < terms.count; i += n) {
        n = kPageFloats - static_cast<int64_t>(reinterpret_cast<uintptr_t>(a.acc + i) % 4096 / sizeof(float));
        if (n > terms.count - i) n = terms.count - i;
        auto at = [&](const float* array) { return array == nullptr ? nullptr : array + i; };
        Terms part = terms;
        part.count = n;
        part.grad = grads ? beside.of(a.grad + i, n, 0, a.acc + i) : a.grad + i;
        part.weight = weights ? beside.of(a.weight + i, n, 1, a.acc + i) : at(a.weight);
        part.residual = at(a.residual);
        part.old_velocity = at(a.old_velocity);
        part.acc = a.acc + i;
        part.velocity = const_cast<float*>(at(a.velocity));
        if (collector != nullptr) collector->first_index = first + static_cast<uint32_t>(i);
        finite &= FloatAccumulation<float>(part, collector).run(store);
    }
    return finite;
}

bool accumulate_doubles(const Terms& terms) {
    auto at = [&](const void* array, int64_t i) {
        return array == nullptr ? 0.0 : load_element<double>(static_cast<const char*>(array), i);
    };
    auto plus = [](double a, double b) { return a + b; };
    auto times = [](double a, double b) { return a * b; };
    bool finite = true;
    for (int64_t i = 0; i < terms.count; ++i) {
        double velocity = 0.0;
        double v =
            corrected(terms, at(terms.grad, i), at(terms.weight, i), at(terms.residual, i), at(terms.old_velocity, i),
                      terms.scale, terms.decay, static_cast<double>(terms.momentum), &velocity, plus, times);
        finite &= __builtin_fabs(v) < __builtin_inf();
        store_element(static_cast<char*>(terms.acc), i, v);
        if (terms.velocity != nullptr) store_element(static_cast<char*>(terms.velocity), i, velocity);
    }
    return finite;
}

}  // namespace

bool accumulate(const Terms& terms, Store store, Collector* collector) {
    if (terms.dtype == DType::kF64) return accumulate_doubles(terms);
    bool finite = with_float_type(terms.grad_dtype, [&](auto* g) {
        using Grad = std::remove_pointer_t<decltype(g)>;
        if constexpr (std::is_same_v<Grad, float>) return accumulate_floats(terms, store, collector);
        return FloatAccumulation<Grad>(terms, collector).run(store);
    });
    if (store == Store::kStreaming) fence_streams();
    return finite;
}

}  // namespace pycomm::PYCOMM_ISA
