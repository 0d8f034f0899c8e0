// Arguments that accumulate and sparsify share.
#pragma once

#include <vector>

#include "bindings/kernel_arguments.h"
#include "kernels/accumulate.h"

namespace pycomm {

// Arrays and numbers of one accumulation, held for the length of a call.
class AccumulationArguments {
   public:
    Accumulation job;

    // `terms`: what pycomm.kernels.accumulate.arguments_of returns.
    AccumulationArguments(py::handle grads, const py::dict& terms);

    void add_to(Arguments& arguments) const;
    bool* finite() const { return static_cast<bool*>(finite_.buffer.data); }
    const Factor& factor() const { return factor_; }

   private:
    void require_gradients() const;
    void take_weights(const py::object& weights);
    void take_clip(const py::object& clip);
    void* optional(const py::object& object, const char* name, Array& held, Access access) const;

    std::vector<Array> grads_, weights_;
    Array acc_, finite_, residual_, velocity_, old_velocity_;
    Factor factor_;
};

}  // namespace pycomm
