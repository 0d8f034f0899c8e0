// Arguments that are not arrays. They are taken as Python objects, so that our own error names the argument and can be
// sent to other ranks; pybind11's conversion would raise an error that lists signatures.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

namespace pycomm {

namespace py = pybind11;

// All throw ArgumentTypeError, or ArgumentError for a number out of range, naming `name`.
int64_t as_integer(py::handle object, const std::string& name);
double as_number(py::handle object, const std::string& name);
bool as_flag(py::handle object, const std::string& name);
// `wanted`: for the error, such as "'sum' or 'max'".
std::string as_text(py::handle object, const std::string& name, const char* wanted);

// Python's repr of it, shortened.
std::string shown(py::handle object);
std::string type_name(py::handle object);

}  // namespace pycomm
