// Arguments of steps of optimizers.
#pragma once

#include <string>
#include <vector>

#include "bindings/kernel_arguments.h"
#include "kernels/step.h"

namespace pycomm {

Rule rule_named(const std::string& name);

// Arrays of one kind, one for each weight, held for the length of a call.
class PerWeight {
   public:
    PerWeight(const py::object& object, const char* name, Access access);

    std::vector<Buffer> buffers() const { return buffers_of(arrays_); }
    const std::vector<Array>& arrays() const { return arrays_; }
    bool given() const { return given_; }
    void are_read(Arguments& arguments) const { arguments.reads(arrays_, name_); }
    void are_written(Arguments& arguments) const { arguments.writes(arrays_, name_); }

    // Requires as many arrays as weights, each as long as its weight.
    void require_shape_of(const std::vector<Buffer>& weights) const;
    void require_dtype(DType dtype, const char* of_what) const;
    std::string name_of_one(size_t j) const { return name_of_item(name_, j); }

   private:
    std::string name_;
    std::vector<Array> arrays_;
    bool given_ = false;
};

// The arrays of one step, which have been checked.
class StepArrays {
   public:
    Step job;

    StepArrays(const std::string& rule, const Coefficients& coefficients, const py::object& weights,
               const py::object& grads, const py::object& copies, const std::vector<py::object>& states);

    void add_to(Arguments& arguments, bool writes_weights, bool writes_states) const;
    // All of them, to keep their memory.
    std::vector<Array> all() const;

   private:
    void check() const;

    PerWeight weights_, grads_, copies_;
    std::vector<PerWeight> states_;
};

// Numbers of a step by parameter: null, or one or two float64 for each of its weights.
class StepNumbers {
   public:
    StepNumbers(const py::object& rates, const py::object& squares, size_t num_weights);

    void add_to(Arguments& arguments) const;
    void give_to(Step& job) const;

   private:
    Array rates_, squares_;
};

}  // namespace pycomm
