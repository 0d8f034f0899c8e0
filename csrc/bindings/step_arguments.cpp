#include "bindings/step_arguments.h"

namespace pycomm {
namespace {

// Names of a rule's states, as pycomm/kernels/step.py has them.
const char* name_of_state(Rule rule, size_t s) {
    static constexpr const char* kMomentum[] = {"buffers", "states", "states"};
    static constexpr const char* kRmsprop[] = {"square_avgs", "momentum_buffers", "grad_avgs"};
    static constexpr const char* kAdagrad[] = {"sums", "states", "states"};
    static constexpr const char* kAdam[] = {"exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"};
    if (rule == Rule::kMomentum) return kMomentum[s];
    if (rule == Rule::kAdagrad) return kAdagrad[s];
    return rule == Rule::kRmsprop ? kRmsprop[s] : kAdam[s];
}

// Number of states that a rule requires: the first ones.
size_t states_needed(Rule rule) {
    if (rule == Rule::kMomentum) return 0;
    return rule == Rule::kRmsprop || rule == Rule::kAdagrad ? 1 : 2;
}

ArgumentTypeError missing(const char* name) {
    return ArgumentTypeError(std::string(name) + " is None, wanted one array for each of weights");
}

}  // namespace

Rule rule_named(const std::string& name) {
    if (name == "momentum") return Rule::kMomentum;
    if (name == "adam") return Rule::kAdam;
    if (name == "rmsprop") return Rule::kRmsprop;
    if (name == "adagrad") return Rule::kAdagrad;
    if (name == "lamb_moments") return Rule::kLambMoments;
    if (name == "lamb_apply") return Rule::kLambApply;
    throw ArgumentError("rule is " + name + ", wanted momentum, adam, rmsprop, adagrad, lamb_moments or lamb_apply");
}

PerWeight::PerWeight(const py::object& object, const char* name, Access access) : name_(name) {
    if (object.is_none()) return;
    given_ = true;
    arrays_ = as_arrays(object, name, access);
}

void PerWeight::require_shape_of(const std::vector<Buffer>& weights) const {
    if (!given_) return;
    require_count(static_cast<int64_t>(arrays_.size()), static_cast<int64_t>(weights.size()), name_,
                  "one for each of weights");
    for (size_t j = 0; j < weights.size(); ++j) {
        const Buffer& one = arrays_[j].buffer;
        bool aligned = reinterpret_cast<uintptr_t>(one.data) % static_cast<uintptr_t>(size_of(one.dtype)) == 0;
        if (one.count == weights[j].count && is_floating(one.dtype) && aligned) continue;  // no name is built
        require_count(one.count, weights[j].count, name_of_one(j), "as its weight has");
        require_floating(one, name_of_one(j));
        require_aligned(one, name_of_one(j));
    }
}

void PerWeight::require_dtype(DType dtype, const char* of_what) const {
    for (size_t j = 0; j < arrays_.size(); ++j) {
        const Buffer& one = arrays_[j].buffer;
        if (one.dtype != dtype) require_same(one, name_of_one(j), Buffer{nullptr, one.count, dtype}, of_what);
    }
}

StepArrays::StepArrays(const std::string& rule, const Coefficients& coefficients, const py::object& weights,
                       const py::object& grads, const py::object& copies, const std::vector<py::object>& states)
    : weights_(weights, "weights", Access::kWrite),
      grads_(grads, "grads", Access::kRead),
      copies_(copies, "copies", Access::kWrite) {
    job.rule = rule_named(rule);
    job.coefficients = coefficients;
    job.weights = weights_.buffers();
    if (states.size() > kMostStates) throw ArgumentError("more than three states");
    for (size_t s = 0; s < states.size(); ++s) {
        states_.emplace_back(states[s], name_of_state(job.rule, s), Access::kWrite);
    }
    check();
    job.grads = grads_.buffers();
    job.copies = copies_.buffers();
    for (size_t s = 0; s < states_.size(); ++s) job.states[s] = states_[s].buffers();
}

void StepArrays::add_to(Arguments& arguments, bool writes_weights, bool writes_states) const {
    writes_weights ? weights_.are_written(arguments) : weights_.are_read(arguments);
    grads_.are_read(arguments);
    copies_.are_written(arguments);
    for (const PerWeight& state : states_) {
        writes_states ? state.are_written(arguments) : state.are_read(arguments);
    }
}

std::vector<Array> StepArrays::all() const {
    std::vector<Array> out;
    auto add = [&](const PerWeight& some) { out.insert(out.end(), some.arrays().begin(), some.arrays().end()); };
    add(weights_);
    add(grads_);
    add(copies_);
    for (const PerWeight& state : states_) add(state);
    return out;
}

void StepArrays::check() const {
    if (!weights_.given()) throw missing("weights");
    DType dtype = job.weights[0].dtype;
    if (dtype != DType::kF32 && dtype != DType::kF64) {
        throw ArgumentTypeError(format("weights[0] has dtype %s, wanted float32 or float64", name_of(dtype)));
    }
    weights_.require_dtype(dtype, "weights[0]");
    weights_.require_shape_of(job.weights);
    grads_.require_shape_of(job.weights);
    copies_.require_shape_of(job.weights);
    for (const PerWeight& state : states_) {
        state.require_shape_of(job.weights);
        state.require_dtype(dtype, "weights[0]");
    }
    if (grads_.given() && !reads_grads(job.rule)) throw ArgumentError("grads are given, but this rule reads none");
    if (!grads_.given() && reads_grads(job.rule)) throw missing("grads");
    for (size_t s = 0; s < states_needed(job.rule); ++s) {
        if (s >= states_.size() || !states_[s].given()) throw missing(name_of_state(job.rule, s));
    }
    std::vector<Buffer> copies = copies_.buffers();
    for (size_t j = 0; j < copies.size(); ++j) {
        bool half = copies[j].dtype == DType::kF16 || copies[j].dtype == DType::kBF16;
        if (half && dtype == DType::kF32) continue;
        throw ArgumentTypeError(format("%s has dtype %s, wanted float16 or bfloat16 copies of float32 weights",
                                       copies_.name_of_one(j).c_str(), name_of(copies[j].dtype)));
    }
}

StepNumbers::StepNumbers(const py::object& rates, const py::object& squares, size_t num_weights) {
    auto count = static_cast<int64_t>(num_weights);
    if (!rates.is_none()) {
        rates_ = as_exactly(rates, "rates", Access::kRead, DType::kF64, count, "one float64 for each of weights");
    }
    if (!squares.is_none()) {
        squares_ = as_exactly(squares, "squares", Access::kWrite, DType::kF64, 2 * count, "two for each of weights");
    }
}

void StepNumbers::add_to(Arguments& arguments) const {
    if (rates_.buffer.data != nullptr) arguments.reads(rates_, "rates");
    if (squares_.buffer.data != nullptr) arguments.writes(squares_, "squares");
}

void StepNumbers::give_to(Step& job) const {
    job.rates = static_cast<const double*>(rates_.buffer.data);
    job.squares = static_cast<double*>(squares_.buffer.data);
}

}  // namespace pycomm
