// Arithmetic of one element of a parameter in a step of an optimizer, on every device; see step.h.
//
// Every product, quotient and root is rounded separately, so that all devices give the same bits. `Ops` defines
// the numbers: Ops::Value, with of(double) and add, sub, mul, div, root, maximum.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PYCOMM_RULE static __host__ __device__ inline
#else
#define PYCOMM_RULE static inline
#endif

namespace pycomm {

enum class Rule : uint8_t { kMomentum, kAdam, kRmsprop, kAdagrad, kLambMoments, kLambApply };

inline constexpr int kMostStates = 3;

// Settings of a step, and what follows from them; a rule ignores those that it does not name.
struct Coefficients {
    double decay = 0.0;            // this times the weight is added to the gradient
    double decoupled_decay = 0.0;  // lr * weight decay: this times the weight is subtracted from it
    double lr = 0.0;               // factor of the direction
    double momentum = 0.0;
    double one_minus_dampening = 1.0;  // factor of a gradient that is added to the momentum
    double beta1 = 0.0;
    double one_minus_beta1 = 0.0;
    double beta2 = 0.0;  // RMSprop's alpha
    double one_minus_beta2 = 0.0;
    double inverse_bias_correction1 = 1.0;       // 1 / (1 - beta1^t)
    double inverse_sqrt_bias_correction2 = 1.0;  // 1 / sqrt(1 - beta2^t)
    double eps = 0.0;
    bool nesterov = false;
    bool corrects_bias = true;  // where counts say what t is
};

// A number of twice the precision.
struct Pair {
    double high, low;
};

// By Dekker's splitting, exact but for the last bits of `low`. Fused multiply-adds are not allowed here.
PYCOMM_RULE Pair product(Pair a, Pair b) {
    constexpr double kSplit = 134217729.0;  // 2^27 + 1
    double ca = kSplit * a.high, cb = kSplit * b.high;
    double ah = ca - (ca - a.high), bh = cb - (cb - b.high);
    double al = a.high - ah, bl = b.high - bh;
    double high = a.high * b.high;
    double low = ((ah * bh - high) + ah * bl + al * bh) + al * bl + (a.high * b.low + a.low * b.high);
    double sum = high + low;
    return {sum, low - (sum - high)};
}

// base^n for 0 <= base < 1 and n >= 1, rounded correctly unless it lies within 2^-90 of the middle between two numbers.
PYCOMM_RULE double power(double base, int64_t n) {
    Pair result = {1.0, 0.0}, square = {base, 0.0};
    for (; n > 1; n /= 2) {
        if (n % 2 == 1) result = product(result, square);
        square = product(square, square);
    }
    return product(result, square).high;
}

// The bias corrections of Coefficients, computed from a count of steps.
struct BiasCorrections {
    double inverse1, inverse_sqrt2;
};

// With `root` for the square root, which devices name differently.
template <class Root>
PYCOMM_RULE BiasCorrections bias_corrections(const Coefficients& c, double count, Root&& root) {
    auto t = static_cast<int64_t>(count);
    if (!c.corrects_bias) return {1.0, 1.0};
    return {1.0 / (1.0 - power(c.beta1, t)), 1.0 / root(1.0 - power(c.beta2, t))};
}

// A rule's coefficients as numbers of Ops.
template <class Ops>
struct Constants {
    using V = typename Ops::Value;
    V scale, decay, decoupled_decay, lr, momentum, one_minus_dampening, one_minus_beta1, beta2, one_minus_beta2,
        inverse_bias_correction1, inverse_sqrt_bias_correction2, eps;
    bool nesterov;

    // scale: factor of the gradients, applied first.
    PYCOMM_RULE Constants of(const Coefficients& c, double scale) {
        return {Ops::of(scale),
                Ops::of(c.decay),
                Ops::of(c.decoupled_decay),
                Ops::of(c.lr),
                Ops::of(c.momentum),
                Ops::of(c.one_minus_dampening),
                Ops::of(c.one_minus_beta1),
                Ops::of(c.beta2),
                Ops::of(c.one_minus_beta2),
                Ops::of(c.inverse_bias_correction1),
                Ops::of(c.inverse_sqrt_bias_correction2),
                Ops::of(c.eps),
                c.nesterov};
    }
};

// One element: in, and out.
template <class Ops>
struct Element {
    typename Ops::Value weight, grad, states[kMostStates];
    typename Ops::Value direction;  // out, of the rules of LAMB
};

// has[s]: whether state s is kept.
template <Rule kRule, class Ops>
struct Update;

// states: the momentum. w -= lr * d
template <class Ops>
struct Update<Rule::kMomentum, Ops> {
    using V = typename Ops::Value;
    PYCOMM_RULE void apply(const Constants<Ops>& c, const bool* has, V rate, Element<Ops>& x) {
        V g = Ops::add(Ops::mul(x.grad, c.scale), Ops::mul(x.weight, c.decay));
        V d = Ops::mul(Ops::mul(rate, c.one_minus_dampening), g);
        if (has[0]) {
            V taken = d;
            d = Ops::add(Ops::mul(c.momentum, x.states[0]), taken);
            x.states[0] = d;
            if (c.nesterov) d = Ops::add(taken, Ops::mul(c.momentum, d));
        }
        x.weight = Ops::sub(x.weight, Ops::mul(c.lr, d));
    }
};

// Moments of Adam and LAMB. states: the first and the second moment.
template <class Ops>
struct Moments {
    using V = typename Ops::Value;
    PYCOMM_RULE void apply(const Constants<Ops>& c, V g, Element<Ops>& x) {
        x.states[0] = Ops::add(x.states[0], Ops::mul(c.one_minus_beta1, Ops::sub(g, x.states[0])));
        x.states[1] = Ops::add(Ops::mul(c.beta2, x.states[1]), Ops::mul(c.one_minus_beta2, Ops::mul(g, g)));
    }
    // first / (sqrt(second) / sqrt(1 - beta2^t) + eps)
    PYCOMM_RULE V ratio(const Constants<Ops>& c, V first, V second) {
        return Ops::div(first, Ops::add(Ops::mul(Ops::root(second), c.inverse_sqrt_bias_correction2), c.eps));
    }
};

// states: first moment, second moment, the largest second moment so far (AMSGrad; may be missing).
template <class Ops>
struct Update<Rule::kAdam, Ops> {
    using V = typename Ops::Value;
    PYCOMM_RULE void apply(const Constants<Ops>& c, const bool* has, V, Element<Ops>& x) {
        V g = Ops::add(Ops::mul(x.grad, c.scale), Ops::mul(x.weight, c.decay));
        Moments<Ops>::apply(c, g, x);
        V second = x.states[1];
        if (has[2]) second = x.states[2] = Ops::maximum(x.states[2], second);
        V d = Moments<Ops>::ratio(c, Ops::mul(x.states[0], c.inverse_bias_correction1), second);
        x.weight = Ops::sub(x.weight, Ops::add(Ops::mul(c.decoupled_decay, x.weight), Ops::mul(c.lr, d)));
    }
};

// states: the mean square, the momentum (may be missing), the mean gradient (centered; may be missing).
template <class Ops>
struct Update<Rule::kRmsprop, Ops> {
    using V = typename Ops::Value;
    PYCOMM_RULE void apply(const Constants<Ops>& c, const bool* has, V, Element<Ops>& x) {
        V g = Ops::add(Ops::mul(x.grad, c.scale), Ops::mul(x.weight, c.decay));
        V square = x.states[0] = Ops::add(Ops::mul(c.beta2, x.states[0]), Ops::mul(c.one_minus_beta2, Ops::mul(g, g)));
        if (has[2]) {
            V mean = x.states[2] = Ops::add(x.states[2], Ops::mul(c.one_minus_beta2, Ops::sub(g, x.states[2])));
            // The variance of a gradient that never changes may round to below 0.
            square = Ops::maximum(Ops::sub(square, Ops::mul(mean, mean)), Ops::of(0.0));
        }
        V d = Ops::div(g, Ops::add(Ops::root(square), c.eps));
        if (has[1]) d = x.states[1] = Ops::add(Ops::mul(c.momentum, x.states[1]), d);
        x.weight = Ops::sub(x.weight, Ops::mul(c.lr, d));
    }
};

// states: the sum of squares.
template <class Ops>
struct Update<Rule::kAdagrad, Ops> {
    using V = typename Ops::Value;
    PYCOMM_RULE void apply(const Constants<Ops>& c, const bool*, V, Element<Ops>& x) {
        V g = Ops::add(Ops::mul(x.grad, c.scale), Ops::mul(x.weight, c.decay));
        V sum = x.states[0] = Ops::add(x.states[0], Ops::mul(g, g));
        x.weight = Ops::sub(x.weight, Ops::mul(c.lr, Ops::div(g, Ops::add(Ops::root(sum), c.eps))));
    }
};

// LAMB's direction, from its moments as they are after this step.
template <class Ops>
struct LambDirection {
    using V = typename Ops::Value;
    PYCOMM_RULE V of(const Constants<Ops>& c, const Element<Ops>& x) {
        V adam = Moments<Ops>::ratio(c, Ops::mul(x.states[0], c.inverse_bias_correction1), x.states[1]);
        return Ops::add(adam, Ops::mul(x.weight, c.decay));
    }
};

// The first pass of LAMB: moments and direction; weights stay.
template <class Ops>
struct Update<Rule::kLambMoments, Ops> {
    using V = typename Ops::Value;
    PYCOMM_RULE void apply(const Constants<Ops>& c, const bool*, V, Element<Ops>& x) {
        Moments<Ops>::apply(c, Ops::mul(x.grad, c.scale), x);
        x.direction = LambDirection<Ops>::of(c, x);
    }
};

// The second: weights follow the direction; moments stay, and there is no gradient.
template <class Ops>
struct Update<Rule::kLambApply, Ops> {
    using V = typename Ops::Value;
    PYCOMM_RULE void apply(const Constants<Ops>& c, const bool*, V rate, Element<Ops>& x) {
        x.direction = LambDirection<Ops>::of(c, x);
        x.weight = Ops::sub(x.weight, Ops::mul(rate, x.direction));
    }
};

// Whether a rule adds 1 to the counts of steps. kLambApply is a step's second pass: the first one counted it.
inline constexpr bool counts_steps(Rule rule) { return rule != Rule::kLambApply; }
inline constexpr bool reads_grads(Rule rule) { return rule != Rule::kLambApply; }
inline constexpr bool writes_states(Rule rule) { return rule != Rule::kLambApply; }
inline constexpr bool writes_weights(Rule rule) { return rule != Rule::kLambMoments; }

}  // namespace pycomm
