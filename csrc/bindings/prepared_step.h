// Steps that are repeated on the same arrays: checked in full once, then only compared with what they were.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bindings/glance.h"
#include "bindings/step_arguments.h"

namespace pycomm {

// One kernel call of a step. Arrays are not kept alive from step to step.
class PreparedStep {
   public:
    Step job;
    int64_t taken = 0;  // steps taken, this one included

    // Throws what StepArrays does, and where arrays overlap.
    PreparedStep(const std::string& rule, const py::object& weights, const py::object& grads, const py::object& copies,
                 const std::vector<py::object>& states, const py::object& counts,
                 const std::vector<py::object>& mirrors);

    // Whether the array has no bytes in common with those that are written.
    bool is_apart_from(const Buffer& array) const;
    void hold(std::vector<py::object> tensors) { held_ = std::move(tensors); }

    // divisor, found: None, or one float32 on the weights' device.
    void run(const std::string& rule, const Coefficients& coefficients, const py::object& rates,
             const py::object& squares, py::handle scale, py::handle divisor, py::handle found, py::handle scratch,
             int num_threads);
    // Squared norms of the weights, then of the gradients.
    void norms(py::handle squares, py::handle scratch, int num_threads);

   private:
    struct Extent {
        const char* begin;
        const char* end;
    };
    // Adds arrays that other processes access too. like: arrays whose types they must have; null: the first of them.
    void take_mirrors(const std::vector<py::object>& mirrors);
    void take_counts(const std::vector<Array>& counts, Arguments& arguments);
    Array example() const;

    std::vector<py::object> held_;  // for the length of a step, weights first
    std::vector<Array> shared_;     // held permanently: they are not compared again
    std::vector<Extent> written_;   // in order
};

// The kernel calls of a parameter group, of whole parameters or of ranges of them.
class PreparedGroup {
   public:
    // keys: names of the states in a parameter's entry, or None; has_counts: the entry has "step", too;
    // same_counts: a kernel call needs one count for all its parameters, unless it reads the counts itself.
    PreparedGroup(std::vector<std::shared_ptr<PreparedStep>> parts, py::tuple keys, bool has_counts, bool same_counts);

    // Remembers how the parameters lie in memory. They must be as they were when the parts were made. part_of[i]: part
    // of parameter i, -1: it has no gradient. begins[i]: the first element, in memory order, that the part steps.
    // Returns whether renew() can recognize them.
    bool remember(py::handle params, py::handle state, py::handle masters, const std::vector<int>& part_of,
                  const std::vector<int64_t>& begins);
    // If everything is as remembered, except for contents and for the addresses of gradients: takes the gradients,
    // counts a step, keeps all arrays until release(), and returns the arrays that the step will write to. Otherwise
    // returns None and changes nothing.
    py::object renew(py::handle params, py::handle state, py::handle masters);
    void release();

   private:
    struct Slot {  // one parameter
        int part = -1;
        size_t place = 0;  // in the part
        int64_t begin = 0;
        int ndim = 0;
        size_t dimensions = 0;  // where they begin in dimensions_: shape, then strides
        // The objects seen at the last look, by role. Only to be compared: they may have been freed.
        PyObject* seen[kMostStates + 3] = {};
    };
    struct Count {
        Buffer buffer;
        int part;
        double next;
    };

    bool look(Slot& slot, PyObject* param, PyObject* state, PyObject* masters);
    bool look_at_entry(Slot& slot, PyObject* entry, const PreparedStep& part);
    bool take_gradient(const Slot& slot, const py::object& grad);
    bool look_at_count(Slot& slot, PyObject* count, const PreparedStep& part);
    bool fits(Slot& slot, size_t what, PyObject* tensor, const Buffer& wanted);
    static Buffer stepped(const Slot& slot, const Buffer& whole, int64_t count);
    bool is_like(const Slot& slot, const Glance& seen) const;
    bool look_at_all(py::handle params, py::handle state, py::handle masters);
    bool count_steps();
    void forget();  // what was looked at

    std::vector<std::shared_ptr<PreparedStep>> parts_;
    std::vector<PyObject*> keys_;  // interned, never freed; null for None
    bool has_counts_, same_counts_;
    std::vector<Slot> slots_;
    std::vector<int64_t> dimensions_;
    std::vector<std::vector<py::object>> held_;  // by part
    std::vector<Count> counts_;
    std::vector<py::object> written_;
};

}  // namespace pycomm
