#include "bindings/accumulation_arguments.h"

#include <cmath>

namespace pycomm {

AccumulationArguments::AccumulationArguments(py::handle grads, const py::dict& terms)
    : grads_(as_arrays(grads, "grads", Access::kRead)),
      acc_(as_array(terms["acc"], "acc", Access::kWrite)),
      finite_(as_movable(terms["finite"], "finite", Access::kWrite)),
      factor_(terms["scale"]) {
    const py::object weights = terms["weights"], clip = terms["clip"];
    const py::object velocity = terms["velocity"], old_velocity = terms["old_velocity"];
    job.grads = buffers_of(grads_);
    job.acc = acc_.buffer;
    require_gradients();
    require_count(finite_.buffer.num_bytes(), static_cast<int64_t>(grads_.size()), "finite", "one per gradient");
    if (!weights.is_none()) take_weights(weights);
    if (!clip.is_none()) take_clip(clip);
    job.residual = optional(terms["residual"], "residual", residual_, Access::kRead);
    job.velocity = optional(velocity, "velocity", velocity_, Access::kWrite);
    job.old_velocity = optional(old_velocity, "old_velocity", old_velocity_, Access::kRead);
    if (velocity.is_none() && !old_velocity.is_none()) throw ArgumentError("old_velocity without velocity");
    job.decay = as_number(terms["decay"], "decay");
    job.momentum = static_cast<float>(as_number(terms["momentum"], "momentum"));
    job.nesterov = as_flag(terms["nesterov"], "nesterov");
}

void AccumulationArguments::add_to(Arguments& arguments) const {
    arguments.writes(acc_, "acc");
    arguments.reads(grads_, "grads");
    arguments.reads(weights_, "decay.weights");
    arguments.writes(finite_, "finite");
    if (job.residual != nullptr) arguments.reads(residual_, "residual");
    if (job.velocity != nullptr) arguments.writes(velocity_, "velocity");
    if (job.old_velocity != nullptr) arguments.reads(old_velocity_, "old_velocity");
    arguments.may_be(acc_, residual_);
    arguments.may_be(velocity_, old_velocity_);
    excuse_in_place(arguments, grads_, acc_);
    factor_.add_to(arguments);
}

void AccumulationArguments::require_gradients() const {
    int64_t total = 0;
    for (size_t j = 0; j < grads_.size(); ++j) {
        const std::string name = name_of_item("grads", j);
        require_floating(job.grads[j], name);
        require_same(job.grads[j], name, Buffer{nullptr, job.grads[j].count, job.grads[0].dtype}, "grads[0]");
        total += job.grads[j].count;
    }
    DType wide = job.grads[0].dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    require_same(acc_.buffer, "acc", Buffer{nullptr, total, wide}, "all grads (in float32, or float64)");
}

void AccumulationArguments::take_weights(const py::object& weights) {
    weights_ = as_arrays(weights, "decay.weights", Access::kRead);
    job.weights = buffers_of(weights_);
    require_count(static_cast<int64_t>(weights_.size()), static_cast<int64_t>(grads_.size()), "decay.weights",
                  "one per gradient");
    for (size_t j = 0; j < grads_.size(); ++j) {
        require_same(job.weights[j], name_of_item("decay.weights", j), job.grads[j], "its gradient");
    }
}

void AccumulationArguments::take_clip(const py::object& clip) {
    job.clip = as_number(clip, "clip");
    if (job.clip > 0.0 && std::isfinite(job.clip)) return;
    throw ArgumentError("clip is " + shown(clip) + ", wanted a finite number above 0");
}

void* AccumulationArguments::optional(const py::object& object, const char* name, Array& held, Access access) const {
    if (object.is_none()) return nullptr;
    held = as_array(object, name, access);
    require_same(held.buffer, name, acc_.buffer, "acc");
    return held.buffer.data;
}

}  // namespace pycomm
