#include "kernels/cpu/loops/members.h"
#include "kernels/cpu/loops/simd.h"

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

// Appends the lanes of v that `hits` names.
inline void append(Collector& collector, Vec v, uint32_t hits, int64_t at) {
    float lanes[kLanes];
    store(lanes, v);
    for (; hits != 0; hits &= hits - 1) {
        if (collector.count == collector.capacity) {
            collector.full = true;
            return;
        }
        int i = __builtin_ctz(hits);
        collector.list[collector.count++] = {float_bits(lanes[i]),
                                             collector.first_index + static_cast<uint32_t>(at + i)};
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
        prefetch_ahead(grad + i, 4 * kLanes);
        if (residual != nullptr) prefetch_ahead(residual + i, 4 * kLanes);
        if (old_velocity != nullptr) prefetch_ahead(old_velocity + i, 4 * kLanes);
    }

    // How many elements precede a cache line border of both outputs; -1 if they never meet one together.
    int64_t head() const {
        int64_t n = elements_before_line(acc);
        return velocity == nullptr || n == elements_before_line(velocity) ? n : -1;
    }
};

// Every branch in here depends on `terms` alone, and costs nothing compared to the wait for memory.
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

    bool run(Store mode) {
        int64_t i = 0, head = mode == Store::kStreaming ? a_.head() : -1;
        if (head >= 0 && head + 4 * kLanes <= terms_.count) {
            partly(i, head);
            for (; i + 4 * kLanes <= terms_.count; i += 4 * kLanes) four<true>(i);
            fence_streams();
        }
        for (; i + 4 * kLanes <= terms_.count; i += 4 * kLanes) four<false>(i);
        partly(i, terms_.count);
        return finite_.all();
    }

   private:
    Vec one(Vec g, Vec w, Vec r, Vec u, Vec* velocity) {
        Vec v = corrected(terms_, g, w, r, u, scale_, decay_, momentum_, velocity, add, mul);
        finite_.check(v);
        return v;
    }

    template <bool kStream>
    void four(int64_t i) {
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
        for (int u = 0; u < 4; ++u) {
            int64_t at = i + u * kLanes;
            kStream ? stream(a_.acc + at, v[u]) : store(a_.acc + at, v[u]);
            if (a_.velocity != nullptr) {
                kStream ? stream(a_.velocity + at, velocity[u]) : store(a_.velocity + at, velocity[u]);
            }
        }
        if (collector_ == nullptr) return;
        for (int u = 0; u < 4; ++u) hits[u] = not_at_most(magnitude(v[u]), limit_);
        if ((hits[0] | hits[1] | hits[2] | hits[3]) == 0) return;
        for (int u = 0; u < 4; ++u) append(*collector_, v[u], hits[u], i + u * kLanes);
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
            if (collector_ != nullptr) append(*collector_, v, not_at_most(magnitude(v), limit_), i);
        }
    }

    const Terms& terms_;
    const Arrays<Grad> a_;
    Collector* const collector_;
    const Vec scale_, decay_, momentum_, limit_;
    Finite finite_;
};

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
    return with_float_type(terms.grad_dtype, [&](auto* g) {
        return FloatAccumulation<std::remove_pointer_t<decltype(g)>>(terms, collector).run(store);
    });
}

}  // namespace pycomm::PYCOMM_ISA
