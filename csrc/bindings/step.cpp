#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/prepared_step.h"

namespace pycomm {
namespace {

void step_arrays(const std::string& rule, const Coefficients& coefficients, const py::object& weights,
                 const py::object& grads, const py::object& copies, const std::vector<py::object>& states,
                 const py::object& rates, const py::object& squares, py::handle scale, py::handle scratch,
                 int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    StepArrays arrays(rule, coefficients, weights, grads, copies, states);
    StepNumbers numbers(rates, squares, arrays.job.weights.size());
    numbers.give_to(arrays.job);
    Factor factor(scale);
    Arguments arguments;
    arrays.add_to(arguments, writes_weights(arrays.job.rule), writes_states(arrays.job.rule));
    numbers.add_to(arguments);
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

void define_flag(py::class_<Coefficients>& type, const char* name, bool Coefficients::* field) {
    type.def_property(
        name, [field](const Coefficients& c) { return c.*field; },
        [field, name](Coefficients& c, py::handle value) { c.*field = as_flag(value, name); });
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
    define_number(coefficients, "beta1", &Coefficients::beta1);
    define_number(coefficients, "one_minus_beta1", &Coefficients::one_minus_beta1);
    define_number(coefficients, "beta2", &Coefficients::beta2);
    define_number(coefficients, "one_minus_beta2", &Coefficients::one_minus_beta2);
    define_number(coefficients, "inverse_bias_correction1", &Coefficients::inverse_bias_correction1);
    define_number(coefficients, "inverse_sqrt_bias_correction2", &Coefficients::inverse_sqrt_bias_correction2);
    define_number(coefficients, "eps", &Coefficients::eps);
    define_flag(coefficients, "nesterov", &Coefficients::nesterov);
    define_flag(coefficients, "corrects_bias", &Coefficients::corrects_bias);
    module.def("step", &step_arrays, py::arg("rule"), py::arg("coefficients"), py::arg("weights"), py::arg("grads"),
               py::arg("copies"), py::arg("states"), py::arg("rates"), py::arg("squares"), py::arg("scale"),
               py::arg("scratch"), py::arg("num_threads"));
    py::class_<PreparedStep, std::shared_ptr<PreparedStep>>(module, "PreparedStep")
        .def(py::init<const std::string&, const py::object&, const py::object&, const py::object&,
                      const std::vector<py::object>&, const py::object&, const std::vector<py::object>&>(),
             py::arg("rule"), py::arg("weights"), py::arg("grads"), py::arg("copies"), py::arg("states"),
             py::arg("counts"), py::arg("mirrors") = std::vector<py::object>())
        .def_readwrite("taken", &PreparedStep::taken)
        .def("run", &PreparedStep::run, py::arg("rule"), py::arg("coefficients"), py::arg("rates"), py::arg("squares"),
             py::arg("scale"), py::arg("divisor"), py::arg("found"), py::arg("scratch"), py::arg("num_threads"))
        .def("norms", &PreparedStep::norms, py::arg("squares"), py::arg("scratch"), py::arg("num_threads"));
    py::class_<PreparedGroup>(module, "PreparedGroup")
        .def(py::init<std::vector<std::shared_ptr<PreparedStep>>, py::tuple, bool, bool>(), py::arg("parts"),
             py::arg("keys"), py::arg("has_counts"), py::arg("same_counts"))
        .def("remember", &PreparedGroup::remember, py::arg("params"), py::arg("state"), py::arg("masters"),
             py::arg("part_of"), py::arg("begins"))
        .def("renew", &PreparedGroup::renew, py::arg("params"), py::arg("state"), py::arg("masters"))
        .def("release", &PreparedGroup::release);
}

}  // namespace pycomm
