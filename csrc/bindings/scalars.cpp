#include "bindings/scalars.h"

#include "base/error.h"

namespace pycomm {
namespace {

ArgumentTypeError wrong(py::handle object, const std::string& name, const std::string& wanted) {
    return ArgumentTypeError(name + " is " + shown(object) + ", wanted " + wanted);
}

ArgumentError out_of_range(py::handle object, const std::string& name, const std::string& wanted) {
    PyErr_Clear();
    return ArgumentError(name + " is " + shown(object) + ", wanted " + wanted);
}

}  // namespace

std::string type_name(py::handle object) {
    return py::str(py::type::handle_of(object).attr("__name__")).cast<std::string>();
}

std::string shown(py::handle object) {
    constexpr size_t kMost = 80;
    try {
        std::string text = py::repr(object).cast<std::string>();
        if (text.size() <= kMost && text.find('\n') == std::string::npos) return text;
    } catch (const py::error_already_set&) {  // a repr that fails, or is no UTF-8
    }
    return "a " + type_name(object);
}

int64_t as_integer(py::handle object, const std::string& name) {
    if (PyBool_Check(object.ptr()) || PyIndex_Check(object.ptr()) == 0) throw wrong(object, name, "an int");
    auto index = py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
    if (!index) {  // an array that is no integer, say
        PyErr_Clear();
        throw wrong(object, name, "an int");
    }
    int64_t value = PyLong_AsLongLong(index.ptr());
    if (value == -1 && PyErr_Occurred() != nullptr) throw out_of_range(object, name, "an int of 64 bits");
    return value;
}

double as_number(py::handle object, const std::string& name) {
    bool text = PyUnicode_Check(object.ptr()) || PyBytes_Check(object.ptr());
    double value = text ? -1.0 : PyFloat_AsDouble(object.ptr());
    if (!text && !(value == -1.0 && PyErr_Occurred() != nullptr)) return value;
    if (!text && PyErr_ExceptionMatches(PyExc_OverflowError) != 0)
        throw out_of_range(object, name, "a float of 64 bits");
    PyErr_Clear();
    throw wrong(object, name, "a number");
}

bool as_flag(py::handle object, const std::string& name) {
    if (object.ptr() == Py_True) return true;
    if (object.ptr() == Py_False) return false;
    throw wrong(object, name, "True or False");
}

std::string as_text(py::handle object, const std::string& name, const char* wanted) {
    if (!PyUnicode_Check(object.ptr())) throw wrong(object, name, wanted);
    try {
        return object.cast<std::string>();
    } catch (const std::exception&) {  // half a surrogate pair has no UTF-8
        throw wrong(object, name, wanted);
    }
}

}  // namespace pycomm
