// A look at a torch tensor that makes no Python object, where torch offers it: for steps, which look at thousands.
#pragma once

#include <pybind11/pybind11.h>

#include "base/buffer.h"

namespace pycomm {

namespace py = pybind11;

// Where a tensor's elements are. Shape and strides are valid until Python code runs, or the next glance.
struct Glance {
    Buffer buffer;
    int ndim = 0;
    const int64_t* shape = nullptr;
    const int64_t* strides = nullptr;

    bool is_contiguous() const;
    // Whether elements lie as in a tensor of this shape and these strides; those of dimensions of size 1 say nothing.
    bool lies_like(int ndim_, const int64_t* shape_, const int64_t* strides_) const;
};

// Returns false, without a Python exception, for what is no ordinary tensor of a known dtype with memory that can be
// used here; what it is instead, as_array says. `is_plain`: it is known not to have its neg bit set, which takes most
// of the time to find out.
bool glance(PyObject* object, Glance& out, bool is_plain = false);

}  // namespace pycomm
