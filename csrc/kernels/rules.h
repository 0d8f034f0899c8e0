// What one element of a parameter goes through in a step of an optimizer, on every device; see step.h.
//
// Every product, quotient and root is rounded by itself, so that all devices give the same bits. `Ops` says what a
// number is: Ops::Value, with of(double) and add, sub, mul, div, root, maximum.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PYCOMM_RULE static __host__ __device__ inline
#else
#define PYCOMM_RULE static inline
#endif

namespace pycomm {

enum class Rule : uint8_t { kMomentum, kAdam, kRmsprop, kLambMoments, kLambApply };

inline constexpr int kMostStates = 3;

// Those that a rule does not name are not looked at.
struct Coefficients {
    double decay = 0.0;  // the weight times this joins the gradient
    double fade = 0.0;   // the weight times this is taken from it (decoupled decay); 1 - fade would lose digits of it
    double lr = 0.0;     // what the direction is multiplied with
    double momentum = 0.0;
    double take = 1.0;     // what a gradient is multiplied with before it joins the momentum
    double keep1 = 0.0;    // 1 - beta1
    double beta2 = 0.0;    // RMSprop's alpha
    double keep2 = 0.0;    // 1 - beta2
    double unbias1 = 1.0;  // 1 / (1 - beta1^t)
    double unroot2 = 1.0;  // 1 / sqrt(1 - beta2^t)
    double eps = 0.0;
    bool nesterov = false;
};

// A rule's coefficients as numbers of Ops.
template <class Ops>
struct Constants {
    using V = typename Ops::Value;
    V scale, decay, fade, lr, momentum, take, keep1, beta2, keep2, unbias1, unroot2, eps;
    bool nesterov;

    // scale: what gradients are multiplied with first.
    PYCOMM_RULE Constants of(const Coefficients& c, double scale) {
        return {Ops::of(scale),     Ops::of(c.decay), Ops::of(c.fade),  Ops::of(c.lr),    Ops::of(c.momentum),
                Ops::of(c.take),    Ops::of(c.keep1), Ops::of(c.beta2), Ops::of(c.keep2), Ops::of(c.unbias1),
                Ops::of(c.unroot2), Ops::of(c.eps),   c.nesterov};
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
        V d = Ops::mul(Ops::mul(rate, c.take), g);
        if (has[0]) {
            V taken = d;
            d = Ops::add(Ops::mul(c.momentum, x.states[0]), taken);
            x.states[0] = d;
            if (c.nesterov) d = Ops::add(taken, Ops::mul(c.momentum, d));
        }
        x.weight = Ops::sub(x.weight, Ops::mul(c.lr, d));
    }
};

// What Adam and LAMB have in common. states: the first and the second moment.
template <class Ops>
struct Moments {
    using V = typename Ops::Value;
    PYCOMM_RULE void apply(const Constants<Ops>& c, V g, Element<Ops>& x) {
        x.states[0] = Ops::add(x.states[0], Ops::mul(c.keep1, Ops::sub(g, x.states[0])));
        x.states[1] = Ops::add(Ops::mul(c.beta2, x.states[1]), Ops::mul(c.keep2, Ops::mul(g, g)));
    }
    // first / (sqrt(second) / sqrt(1 - beta2^t) + eps)
    PYCOMM_RULE V ratio(const Constants<Ops>& c, V first, V second) {
        return Ops::div(first, Ops::add(Ops::mul(Ops::root(second), c.unroot2), c.eps));
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
        V d = Moments<Ops>::ratio(c, Ops::mul(x.states[0], c.unbias1), second);
        x.weight = Ops::sub(x.weight, Ops::add(Ops::mul(c.fade, x.weight), Ops::mul(c.lr, d)));
    }
};

// states: the mean square, the momentum (may be missing), the mean gradient (centered; may be missing).
template <class Ops>
struct Update<Rule::kRmsprop, Ops> {
    using V = typename Ops::Value;
    PYCOMM_RULE void apply(const Constants<Ops>& c, const bool* has, V, Element<Ops>& x) {
        V g = Ops::add(Ops::mul(x.grad, c.scale), Ops::mul(x.weight, c.decay));
        V square = x.states[0] = Ops::add(Ops::mul(c.beta2, x.states[0]), Ops::mul(c.keep2, Ops::mul(g, g)));
        if (has[2]) {
            V mean = x.states[2] = Ops::add(x.states[2], Ops::mul(c.keep2, Ops::sub(g, x.states[2])));
            // Of a gradient that never changes the variance may round to below 0.
            square = Ops::maximum(Ops::sub(square, Ops::mul(mean, mean)), Ops::of(0.0));
        }
        V d = Ops::div(g, Ops::add(Ops::root(square), c.eps));
        if (has[1]) d = x.states[1] = Ops::add(Ops::mul(c.momentum, x.states[1]), d);
        x.weight = Ops::sub(x.weight, Ops::mul(c.lr, d));
    }
};

// LAMB's direction, from its moments as they are after this step.
template <class Ops>
struct LambDirection {
    using V = typename Ops::Value;
    PYCOMM_RULE V of(const Constants<Ops>& c, const Element<Ops>& x) {
        V adam = Moments<Ops>::ratio(c, Ops::mul(x.states[0], c.unbias1), x.states[1]);
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

inline constexpr bool reads_grads(Rule rule) { return rule != Rule::kLambApply; }
inline constexpr bool writes_states(Rule rule) { return rule != Rule::kLambApply; }
inline constexpr bool writes_weights(Rule rule) { return rule != Rule::kLambMoments; }

}  // namespace pycomm
