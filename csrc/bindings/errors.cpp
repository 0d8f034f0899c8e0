#include "base/error.h"

#include "bindings/bindings.h"

namespace pycomm {
namespace {

namespace py = pybind11;

void set_comm_error(const CommFailure& failure) {
    py::object type = py::module_::import("pycomm.errors").attr("CommError");
    py::object peer = failure.peer < 0 ? py::none() : py::object(py::int_(failure.peer));
    py::object error = type(failure.what(), py::arg("rank") = failure.rank, py::arg("peer") = peer,
                            py::arg("operation") = failure.operation, py::arg("elapsed") = failure.elapsed);
    PyErr_SetObject(type.ptr(), error.ptr());
}

}  // namespace

void bind_errors() {
    py::register_exception_translator([](std::exception_ptr current) {
        try {
            std::rethrow_exception(current);
        } catch (const CommFailure& failure) {
            set_comm_error(failure);
        } catch (const ArgumentTypeError& error) {
            PyErr_SetString(PyExc_TypeError, error.what());
        } catch (const ArgumentError& error) {
            PyErr_SetString(PyExc_ValueError, error.what());
        } catch (const OutOfMemory& error) {
            PyErr_SetString(PyExc_MemoryError, error.what());
        } catch (const DeviceError& error) {
            PyErr_SetString(PyExc_RuntimeError, error.what());
        }
    });
}

}  // namespace pycomm
