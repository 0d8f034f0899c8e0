// A look at a torch tensor that creates no Python objects, if torch supports that. For steps, which look at thousands.
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
    // Whether elements lie as in a tensor of this shape and these strides. Strides of dimensions of size 1 do not
    // matter.
    bool lies_like(int ndim_, const int64_t* shape_, const int64_t* strides_) const;
};

// Returns false, without a Python exception, unless `object` is an ordinary tensor of a known dtype in usable memory;
// as_array then says what is wrong. `is_plain`: its neg bit is known not to be set; finding that out takes most of the
// time.
bool glance(PyObject* object, Glance& out, bool is_plain = false);

}  // namespace pycomm
