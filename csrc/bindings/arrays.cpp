#include "bindings/arrays.h"

#include "base/error.h"
#include "bindings/described.h"
#include "bindings/glance.h"
#include "bindings/scalars.h"

namespace pycomm {
namespace {

py::object plain_copy(py::handle object, const std::string& name) {
    if (is_tensor(object)) {
        return object.attr("resolve_conj")().attr("resolve_neg")().attr("contiguous")();
    }
    if (!py::hasattr(object, "__cuda_array_interface__")) {
        return py::module_::import("numpy").attr("ascontiguousarray")(object);
    }
    if (!py::hasattr(object, "copy")) {
        throw ArgumentError(name + " is not contiguous, and a " + type_name(object) + " cannot copy itself");
    }
    return object.attr("copy")();
}

// A contiguous copy. It may be far larger than the array: in an expanded one, an element stands for many.
py::object contiguous_copy(py::handle object, const std::string& name) {
    try {
        return plain_copy(object, name);
    } catch (py::error_already_set& error) {
        if (!error.matches(PyExc_RuntimeError) && !error.matches(PyExc_MemoryError)) throw;
        throw OutOfMemory(name + " is not contiguous, and there is no memory for a copy: " + reason(error));
    }
}

Described describe_as_is(py::handle object, const std::string& name) {
    if (PyType_Check(object.ptr())) {  // a class has all attributes of its instances
        throw ArgumentTypeError(name + " is " + shown(object) + ", wanted an array, not its class");
    }
    if (is_tensor(object)) {
        return describe_tensor(object, name);
    }
    if (PyObject_CheckBuffer(object.ptr()) != 0) {
        return describe_buffer(object, name);
    }
    if (py::hasattr(object, "__cuda_array_interface__")) {
        return describe_cuda_interface(object, name);
    }
    if (py::hasattr(object, "__dlpack__")) {
        return describe_dlpack(object, name);
    }
    if (py::hasattr(object, "__array_interface__")) {
        return describe_array_interface(object, name);
    }
    throw ArgumentTypeError(
        format("%s is a %s, wanted a torch tensor, a numpy or cupy array or an object with __dlpack__, "
               "__array_interface__ or __cuda_array_interface__",
               name.c_str(), type_name(object).c_str()));
}

ArgumentTypeError unknown_dtype(const Described& described, const std::string& name) {
    return ArgumentTypeError(
        format("%s has dtype %s, wanted one of float32, float16, bfloat16, float64, int8, uint8, int32, int64",
               name.c_str(), described.dtype_name.c_str()));
}

Described describe(py::handle object, const std::string& name, Access access) {
    Described out = describe_as_is(object, name);
    if (access == Access::kWrite && !out.writable) {
        throw ArgumentError(format("%s is read-only, wanted an array to write to", name.c_str()));
    }
    if (out.lazy && access == Access::kWrite) {
        throw ArgumentError(name +
                            " has its conj or neg bit set, wanted an array to write to: resolve_conj(), "
                            "resolve_neg() make one");
    }
    if (!out.contiguous || out.lazy) {
        if (access == Access::kRead) {
            Described copy = describe_as_is(contiguous_copy(out.array.owner, name), name);
            if (copy.contiguous && !copy.lazy) return copy;
            throw ArgumentTypeError(name + " is a " + type_name(object) + " whose copies are not contiguous");
        }
        throw ArgumentError(format("%s is not contiguous, wanted a contiguous array to write to", name.c_str()));
    }
    return out;
}

// Fast path for contiguous tensors, which most arrays are.
bool take_at_a_glance(py::handle object, Array& out) {
    Glance seen;
    if (!glance(object.ptr(), seen) || !seen.is_contiguous()) return false;
    out.buffer = seen.buffer;
    out.owner = py::reinterpret_borrow<py::object>(object);
    out.is_torch = true;
    return true;
}

// Hash of a dtype's name, never 0.
uint8_t tag_of(const std::string& dtype_name) {
    uint32_t hash = 2166136261u;  // FNV-1a
    for (char c : dtype_name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
    return static_cast<uint8_t>(1 + hash % 255);
}

// A list or tuple of what is in the sequence.
py::object as_fast_sequence(py::handle sequence, const std::string& name) {
    bool ordered = PySequence_Check(sequence.ptr()) != 0 && !py::isinstance<py::str>(sequence);
    auto fast = py::reinterpret_steal<py::object>(ordered ? PySequence_Fast(sequence.ptr(), "") : nullptr);
    if (fast) return fast;
    PyErr_Clear();
    throw ArgumentTypeError(
        format("%s is a %s, wanted a sequence of arrays", name.c_str(), type_name(sequence).c_str()));
}

}  // namespace

Array as_array(py::handle object, const std::string& name, Access access) {
    Array seen;
    if (take_at_a_glance(object, seen)) return seen;
    Described described = describe(object, name, access);
    if (!described.dtype) throw unknown_dtype(described, name);
    described.array.buffer.dtype = *described.dtype;
    return std::move(described.array);
}

Array as_movable(py::handle object, const std::string& name, Access access) {
    Array seen;
    if (take_at_a_glance(object, seen)) return seen;
    Described described = describe(object, name, access);
    described.array.buffer.dtype = described.dtype.value_or(DType::kU8);
    if (!described.dtype) {
        described.array.buffer.count *= described.itemsize;
        described.array.unit = described.itemsize;
        described.array.buffer.tag = tag_of(described.dtype_name);
    }
    return std::move(described.array);
}

std::pair<int64_t, DType> look(py::handle object, const std::string& name) {
    Described described = describe_as_is(object, name);
    if (!described.dtype) throw unknown_dtype(described, name);
    return {described.array.buffer.count, *described.dtype};
}

std::vector<Array> as_arrays(py::handle sequence, const std::string& name, Access access) {
    py::object fast = as_fast_sequence(sequence, name);
    Py_ssize_t size = PySequence_Fast_GET_SIZE(fast.ptr());
    if (size == 0) throw ArgumentError(format("%s is empty, wanted at least one array", name.c_str()));
    std::vector<Array> out;
    out.reserve(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
        PyObject* item = PySequence_Fast_GET_ITEM(fast.ptr(), i);
        Array seen;  // no name is built for these
        out.push_back(take_at_a_glance(item, seen) ? std::move(seen)
                                                   : as_array(item, name + "[" + std::to_string(i) + "]", access));
    }
    return out;
}

std::vector<Array> as_parts(py::handle sequence, const std::string& name, Access access, int size) {
    py::object fast = as_fast_sequence(sequence, name);
    const Py_ssize_t found = PySequence_Fast_GET_SIZE(fast.ptr());
    if (found != size) {
        throw ArgumentError(format("%s has %lld arrays, wanted %d, one for each rank", name.c_str(),
                                   static_cast<long long>(found), size));
    }
    std::vector<Array> out(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < found; ++i) {
        PyObject* item = PySequence_Fast_GET_ITEM(fast.ptr(), i);
        if (item == Py_None || take_at_a_glance(item, out[static_cast<size_t>(i)])) continue;
        out[static_cast<size_t>(i)] = as_movable(item, name + "[" + std::to_string(i) + "]", access);
    }
    for (size_t i = 0; i < out.size(); ++i) {
        if (out[i].on_device()) require_host(out[i], name + "[" + std::to_string(i) + "]");
    }
    return out;
}

std::vector<Buffer> buffers_of(const std::vector<Array>& arrays) {
    std::vector<Buffer> out;
    out.reserve(arrays.size());
    for (const Array& array : arrays) out.push_back(array.buffer);
    return out;
}

DType dtype_named(const std::string& name) {
    for (int i = 0; i < kNumDTypes; ++i) {
        if (name == name_of(static_cast<DType>(i))) return static_cast<DType>(i);
    }
    throw ArgumentTypeError("unknown dtype " + name);
}

void require_floating(const Buffer& buffer, const std::string& name) {
    if (is_floating(buffer.dtype)) return;
    throw ArgumentTypeError(
        format("%s has dtype %s, wanted float32, float16, bfloat16 or float64", name.c_str(), name_of(buffer.dtype)));
}

void require_host(const Array& array, const std::string& name) {
    if (!array.on_device()) return;
    throw ArgumentError(name + " is on " + device_name(array.buffer.device) + ", wanted an array in CPU memory");
}

std::string device_name(int device) { return device == Buffer::kHost ? "cpu" : "cuda:" + std::to_string(device); }

}  // namespace pycomm
