#include "kernels/step.h"

#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

Rule rule_named(const std::string& name) {
    if (name == "momentum") return Rule::kMomentum;
    if (name == "adam") return Rule::kAdam;
    if (name == "rmsprop") return Rule::kRmsprop;
    if (name == "lamb_moments") return Rule::kLambMoments;
    if (name == "lamb_apply") return Rule::kLambApply;
    throw ArgumentError("rule is " + name + ", wanted momentum, adam, rmsprop, lamb_moments or lamb_apply");
}

// Names of a rule's states, as pycomm/kernels/step.py has them.
const char* name_of_state(Rule rule, size_t s) {
    static constexpr const char* kMomentum[] = {"buffers", "states", "states"};
    static constexpr const char* kRmsprop[] = {"square_avgs", "momentum_buffers", "grad_avgs"};
    static constexpr const char* kAdam[] = {"exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"};
    if (rule == Rule::kMomentum) return kMomentum[s];
    return rule == Rule::kRmsprop ? kRmsprop[s] : kAdam[s];
}

// Number of states that a rule cannot do without, the first ones.
size_t states_needed(Rule rule) {
    if (rule == Rule::kMomentum) return 0;
    return rule == Rule::kRmsprop ? 1 : 2;
}

// Arrays of one kind, one for each weight, held for the length of a call.
class PerWeight {
   public:
    PerWeight(const py::object& object, const char* name, Access access) : name_(name) {
        if (object.is_none()) return;
        given_ = true;
        arrays_ = as_arrays(object, name, access);
    }

    std::vector<Buffer> buffers() const { return buffers_of(arrays_); }
    bool given() const { return given_; }
    void are_read(Arguments& arguments) const { arguments.reads(arrays_, name_); }
    void are_written(Arguments& arguments) const { arguments.writes(arrays_, name_); }

    // Requires as many arrays as weights, each as long as its weight.
    void require_shape_of(const std::vector<Buffer>& weights) const {
        if (!given_) return;
        require_count(static_cast<int64_t>(arrays_.size()), static_cast<int64_t>(weights.size()), name_,
                      "one for each of weights");
        for (size_t j = 0; j < weights.size(); ++j) {
            require_count(arrays_[j].buffer.count, weights[j].count, name_of_one(j), "as its weight has");
            require_floating(arrays_[j].buffer, name_of_one(j));
            require_aligned(arrays_[j].buffer, name_of_one(j));
        }
    }

    void require_dtype(DType dtype, const char* of_what) const {
        for (size_t j = 0; j < arrays_.size(); ++j) {
            require_same(arrays_[j].buffer, name_of_one(j), Buffer{nullptr, arrays_[j].buffer.count, dtype}, of_what);
        }
    }

    std::string name_of_one(size_t j) const { return name_of_item(name_, j); }

   private:
    std::string name_;
    std::vector<Array> arrays_;
    bool given_ = false;
};

// The arrays of one step.
class StepArrays {
   public:
    Step job;

    StepArrays(const std::string& rule, const Coefficients& coefficients, const py::object& weights,
               const py::object& grads, const py::object& copies, const std::vector<py::object>& states,
               const py::object& rates, const py::object& squares)
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
        auto count = static_cast<int64_t>(job.weights.size());
        if (!rates.is_none()) {
            rates_ = as_exactly(rates, "rates", Access::kRead, DType::kF64, count, "one float64 for each of weights");
            job.rates = static_cast<const double*>(rates_.buffer.data);
        }
        if (!squares.is_none()) {
            squares_ =
                as_exactly(squares, "squares", Access::kWrite, DType::kF64, 2 * count, "two for each of weights");
            job.squares = static_cast<double*>(squares_.buffer.data);
        }
    }

    void add_to(Arguments& arguments) const {
        const bool writes_weights = job.rule != Rule::kLambMoments, writes_states = job.rule != Rule::kLambApply;
        writes_weights ? weights_.are_written(arguments) : weights_.are_read(arguments);
        grads_.are_read(arguments);
        copies_.are_written(arguments);
        for (const PerWeight& state : states_) {
            writes_states ? state.are_written(arguments) : state.are_read(arguments);
        }
        if (job.rates != nullptr) arguments.reads(rates_, "rates");
        if (job.squares != nullptr) arguments.writes(squares_, "squares");
    }

   private:
    void check() const {
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
            throw ArgumentTypeError(format("%s has dtype %s, wanted float16 or bfloat16, of weights in float32",
                                           copies_.name_of_one(j).c_str(), name_of(copies[j].dtype)));
        }
    }

    static ArgumentTypeError missing(const char* name) {
        return ArgumentTypeError(std::string(name) + " is None, wanted one array for each of weights");
    }

    PerWeight weights_, grads_, copies_;
    std::vector<PerWeight> states_;
    Array rates_, squares_;
};

void step_arrays(const std::string& rule, const Coefficients& coefficients, const py::object& weights,
                 const py::object& grads, const py::object& copies, const std::vector<py::object>& states,
                 const py::object& rates, const py::object& squares, py::handle scale, py::handle scratch,
                 int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    StepArrays arrays(rule, coefficients, weights, grads, copies, states, rates, squares);
    Factor factor(scale);
    Arguments arguments;
    arrays.add_to(arguments);
    factor.add_to(arguments);
    arguments.require_apart();
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::step_workspace_bytes(arrays.job));
            cuda::step(arrays.job, factor.on_gpu(), workspace, call.stream());
        },
        [&] { step(arrays.job, factor.on_cpu(), num_threads); });
}

void define_number(py::class_<Coefficients>& type, const char* name, double Coefficients::* field) {
    type.def_property(
        name, [field](const Coefficients& c) { return c.*field; },
        [field, name](Coefficients& c, py::handle value) { c.*field = as_number(value, name); });
}

}  // namespace

void bind_step(py::module_& module) {
    py::class_<Coefficients> coefficients(module, "Coefficients");
    coefficients.def(py::init<>());
    define_number(coefficients, "decay", &Coefficients::decay);
    define_number(coefficients, "decoupled_decay", &Coefficients::decoupled_decay);
    define_number(coefficients, "lr", &Coefficients::lr);
    define_number(coefficients, "momentum", &Coefficients::momentum);
    define_number(coefficients, "one_minus_dampening", &Coefficients::one_minus_dampening);
    define_number(coefficients, "one_minus_beta1", &Coefficients::one_minus_beta1);
    define_number(coefficients, "beta2", &Coefficients::beta2);
    define_number(coefficients, "one_minus_beta2", &Coefficients::one_minus_beta2);
    define_number(coefficients, "inverse_bias_correction1", &Coefficients::inverse_bias_correction1);
    define_number(coefficients, "inverse_sqrt_bias_correction2", &Coefficients::inverse_sqrt_bias_correction2);
    define_number(coefficients, "eps", &Coefficients::eps);
    coefficients.def_property(
        "nesterov", [](const Coefficients& c) { return c.nesterov; },
        [](Coefficients& c, py::handle value) { c.nesterov = as_flag(value, "nesterov"); });
    module.def("step", &step_arrays, py::arg("rule"), py::arg("coefficients"), py::arg("weights"), py::arg("grads"),
               py::arg("copies"), py::arg("states"), py::arg("rates"), py::arg("squares"), py::arg("scale"),
               py::arg("scratch"), py::arg("num_threads"));
}

}  // namespace pycomm
