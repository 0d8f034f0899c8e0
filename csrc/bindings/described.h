// Descriptions of arrays, one function for each kind. Parts of arrays.cpp.
#pragma once

#include <optional>
#include <string>

#include "bindings/arrays.h"

namespace pycomm {

struct Described {
    Array array;
    std::optional<DType> dtype;  // none: a type the kernels do not know
    int64_t itemsize;
    std::string dtype_name;
    bool contiguous;
    bool writable;
    bool lazy = false;  // conjugated or negated only on reading
};

// Returns whether `object` is a torch tensor; torch need not have been imported.
bool is_tensor(py::handle object);
// Returns whether it is a torch tensor that holds its own numbers: no DTensor, no FakeTensor.
bool is_ordinary_tensor(py::handle object);

// These throw as as_array does, whatever the object's own methods raise.
Described describe_tensor(py::handle tensor, const std::string& name);
Described describe_buffer(py::handle object, const std::string& name);           // the buffer protocol
Described describe_array_interface(py::handle object, const std::string& name);  // numpy's, in the host's memory
Described describe_cuda_interface(py::handle object, const std::string& name);
Described describe_dlpack(py::handle object, const std::string& name);

// Throws unless this build and this machine can work on arrays of a GPU.
void require_device(const std::string& name, const std::string& where);

// Type and text of a Python exception.
std::string reason(py::error_already_set& error);

}  // namespace pycomm
