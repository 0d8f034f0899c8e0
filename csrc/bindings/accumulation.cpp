#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"
#include "kernels/accumulate.h"
#include "kernels/sparsify.h"

namespace pycomm {
namespace {

// The arrays of one accumulation, held for the length of a call.
class AccumulationArrays {
   public:
    Accumulation job;

    AccumulationArrays(py::handle grads, py::object weights, py::object factors, py::handle acc, py::object residual,
                       py::object velocity, py::object old_velocity, py::handle finite) {
        grads_ = as_arrays(grads, "grads", Access::kRead);
        acc_ = as_array(acc, "acc", Access::kWrite);
        finite_ = as_movable(finite, "finite", Access::kWrite);
        job.grads = buffers_of(grads_);
        job.acc = acc_.buffer;
        require_gradients();
        require_count(finite_.buffer.num_bytes(), static_cast<int64_t>(grads_.size()), "finite", "one per gradient");
        if (!weights.is_none()) take_weights(weights);
        if (!factors.is_none()) {
            factors_ = as_array(factors, "factors", Access::kRead);
            require_same(factors_.buffer, "factors", Buffer{nullptr, static_cast<int64_t>(grads_.size()), DType::kF32},
                         "one float32 per gradient");
            require_aligned(factors_.buffer, "factors");
            job.factors = static_cast<const float*>(factors_.buffer.data);
        }
        job.residual = optional(residual, "residual", residual_, Access::kRead);
        job.velocity = optional(velocity, "velocity", velocity_, Access::kWrite);
        job.old_velocity = optional(old_velocity, "old_velocity", old_velocity_, Access::kRead);
        if (velocity.is_none() && !old_velocity.is_none()) {
            throw ArgumentError("old_velocity without velocity");
        }
    }

    void add_to(Arguments& arguments) const {
        arguments.writes(acc_, "acc");
        arguments.reads(grads_, "grads");
        arguments.reads(weights_, "decay.weights");
        arguments.writes(finite_, "finite");
        if (job.factors != nullptr) arguments.reads(factors_, "factors");
        if (job.residual != nullptr) arguments.reads(residual_, "residual");
        if (job.velocity != nullptr) arguments.writes(velocity_, "velocity");
        if (job.old_velocity != nullptr) arguments.reads(old_velocity_, "old_velocity");
        arguments.may_be(acc_, residual_);
        arguments.may_be(velocity_, old_velocity_);
        excuse_in_place(arguments, grads_, acc_);
    }

    bool* finite() const { return static_cast<bool*>(finite_.buffer.data); }

   private:
    void require_gradients() const {
        int64_t total = 0;
        for (size_t j = 0; j < grads_.size(); ++j) {
            std::string name = "grads[" + std::to_string(j) + "]";
            require_floating(job.grads[j], name);
            require_same(job.grads[j], name, Buffer{nullptr, job.grads[j].count, job.grads[0].dtype}, "grads[0]");
            total += job.grads[j].count;
        }
        DType wide = job.grads[0].dtype == DType::kF64 ? DType::kF64 : DType::kF32;
        require_same(acc_.buffer, "acc", Buffer{nullptr, total, wide}, "all grads (in float32, or float64)");
    }

    void take_weights(const py::object& weights) {
        weights_ = as_arrays(weights, "decay.weights", Access::kRead);
        job.weights = buffers_of(weights_);
        require_count(static_cast<int64_t>(weights_.size()), static_cast<int64_t>(grads_.size()), "decay.weights",
                      "one per gradient");
        for (size_t j = 0; j < grads_.size(); ++j) {
            require_same(job.weights[j], "decay.weights[" + std::to_string(j) + "]", job.grads[j], "its gradient");
        }
    }

    void* optional(const py::object& object, const char* name, Array& held, Access access) const {
        if (object.is_none()) return nullptr;
        held = as_array(object, name, access);
        require_same(held.buffer, name, acc_.buffer, "acc");
        return held.buffer.data;
    }

    std::vector<Array> grads_, weights_;
    Array acc_, finite_, factors_, residual_, velocity_, old_velocity_;
};

void accumulate_arrays(py::handle grads, py::object weights, py::object factors, py::handle acc, py::object residual,
                       py::object velocity, py::object old_velocity, py::handle finite, py::handle scale,
                       py::handle decay, py::handle momentum, py::handle nesterov, py::handle scratch,
                       int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    AccumulationArrays arrays(grads, weights, factors, acc, residual, velocity, old_velocity, finite);
    arrays.job.decay = as_number(decay, "decay");
    arrays.job.momentum = static_cast<float>(as_number(momentum, "momentum"));
    arrays.job.nesterov = as_flag(nesterov, "nesterov");
    Factor factor(scale);
    Arguments arguments;
    arrays.add_to(arguments);
    factor.add_to(arguments);
    arguments.require_apart();
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            cuda::Workspace& workspace = call.workspace(memory, cuda::accumulate_workspace_bytes(arrays.job));
            without_gil([&] { cuda::accumulate(arrays.job, factor.scale, arrays.finite(), workspace, call.stream()); });
            return call.finish();
        }
    }
    require_number(factor);
    py::gil_scoped_release release;
    accumulate(arrays.job, factor.scale.value, arrays.finite(), num_threads);
}

std::vector<int64_t> integers_of(py::handle sequence, const char* name) {
    if (!py::isinstance<py::sequence>(sequence) || py::isinstance<py::str>(sequence)) {
        throw ArgumentTypeError(std::string(name) + " is " + shown(sequence) + ", wanted a sequence of ints");
    }
    std::vector<int64_t> integers;
    for (py::handle item : py::reinterpret_borrow<py::sequence>(sequence)) {
        integers.push_back(as_integer(item, std::string(name) + "[" + std::to_string(integers.size()) + "]"));
    }
    return integers;
}

int64_t checked_total(const Accumulation& job, const std::vector<int64_t>& counts) {
    require_count(static_cast<int64_t>(counts.size()), static_cast<int64_t>(job.grads.size()), "counts",
                  "one per gradient");
    if (job.acc.count > INT32_MAX) {
        throw ArgumentError(format("acc has %lld elements, wanted at most 2147483647: indices are int32",
                                   static_cast<long long>(job.acc.count)));
    }
    int64_t total = 0;
    for (size_t j = 0; j < counts.size(); ++j) {
        if (counts[j] < 0 || counts[j] > job.grads[j].count) {
            throw ArgumentError(format("counts[%zu] is %lld, wanted 0 <= count <= %lld, the elements of grads[%zu]", j,
                                       static_cast<long long>(counts[j]), static_cast<long long>(job.grads[j].count),
                                       j));
        }
        total += counts[j];
    }
    return total;
}

void sparsify_arrays(py::handle grads, py::object weights, py::object factors, py::handle acc, py::object residual,
                     py::object velocity, py::object old_velocity, py::handle finite, py::handle scale,
                     py::handle decay, py::handle momentum, py::handle nesterov, py::handle how_many, py::handle values,
                     py::handle indices, py::handle thresholds, py::handle missed, py::handle scratch,
                     int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    AccumulationArrays arrays(grads, weights, factors, acc, residual, velocity, old_velocity, finite);
    arrays.job.decay = as_number(decay, "decay");
    arrays.job.momentum = static_cast<float>(as_number(momentum, "momentum"));
    arrays.job.nesterov = as_flag(nesterov, "nesterov");
    Factor factor(scale);
    const std::vector<int64_t> counts = integers_of(how_many, "counts");
    const int64_t total = checked_total(arrays.job, counts);
    const auto num_grads = static_cast<int64_t>(counts.size());
    Arguments arguments;
    arrays.add_to(arguments);
    factor.add_to(arguments);
    auto taken = [&](py::handle object, const char* name, DType dtype, int64_t count, const char* of_what) {
        return as_exactly(object, name, Access::kWrite, dtype, count, of_what);
    };
    Array top = taken(values, "values", arrays.job.acc.dtype, total, "acc, as many as counts say");
    Array places = taken(indices, "indices", DType::kI32, total, "int32, as many as counts say");
    Array limits = taken(thresholds, "thresholds", DType::kF32, num_grads, "one float32 per gradient");
    Array misses = as_movable(missed, "missed", Access::kWrite);
    require_count(misses.buffer.num_bytes(), num_grads, "missed", "one bool per gradient");
    arguments.writes(top, "values");
    arguments.writes(places, "indices");
    arguments.writes(limits, "thresholds");
    arguments.writes(misses, "missed");
    arguments.require_apart();
    Selection selection{counts, top.buffer, static_cast<int32_t*>(places.buffer.data),
                        static_cast<float*>(limits.buffer.data), static_cast<bool*>(misses.buffer.data)};
    if constexpr (kHasCuda) {
        if (on_gpu(arguments)) {
            DeviceCall call(arguments);
            cuda::Workspace& workspace = call.workspace(memory, cuda::sparsify_workspace_bytes(arrays.job, selection));
            without_gil([&] {
                cuda::sparsify(arrays.job, factor.scale, selection, arrays.finite(), workspace, call.stream());
            });
            return call.finish();
        }
    }
    require_number(factor);
    py::gil_scoped_release release;
    sparsify(arrays.job, factor.scale.value, selection, arrays.finite(), num_threads);
}

}  // namespace

void bind_accumulation(py::module_& module) {
    auto scratch = py::arg("scratch");
    auto num_threads = py::arg("num_threads");
    module.def("accumulate", &accumulate_arrays, py::arg("grads"), py::arg("weights"), py::arg("factors"),
               py::arg("acc"), py::arg("residual"), py::arg("velocity"), py::arg("old_velocity"), py::arg("finite"),
               py::arg("scale"), py::arg("decay"), py::arg("momentum"), py::arg("nesterov"), scratch, num_threads);
    module.def("sparsify", &sparsify_arrays, py::arg("grads"), py::arg("weights"), py::arg("factors"), py::arg("acc"),
               py::arg("residual"), py::arg("velocity"), py::arg("old_velocity"), py::arg("finite"), py::arg("scale"),
               py::arg("decay"), py::arg("momentum"), py::arg("nesterov"), py::arg("counts"), py::arg("values"),
               py::arg("indices"), py::arg("thresholds"), py::arg("missed"), scratch, num_threads);
}

}  // namespace pycomm
