#include "bindings/arrays.h"

#include <pybind11/stl.h>

#include <optional>

#include "base/error.h"
#include "device/runtime.h"

namespace pycomm {
namespace {

struct Described {
    Array array;
    std::optional<DType> dtype;  // none: a type the kernels do not know
    int64_t itemsize;
    std::string dtype_name;
    bool contiguous;
    bool writable;
};

std::string type_name(py::handle object) {
    return py::str(py::type::handle_of(object).attr("__name__")).cast<std::string>();
}

// torch, if the process has imported it; a tensor cannot exist otherwise.
struct Torch {
    py::object tensor_type, strided;
    std::vector<std::pair<py::object, DType>> dtypes;

    static const Torch* get() {
        static Torch* torch = nullptr;  // leaked: Python objects must not die after the interpreter
        if (torch != nullptr) return torch;
        py::dict modules = py::module_::import("sys").attr("modules");
        if (!modules.contains("torch")) return nullptr;
        py::object module = modules["torch"];
        if (!py::hasattr(module, "Tensor") || !py::hasattr(module, "strided")) return nullptr;  // half imported
        auto* fresh = new Torch{module.attr("Tensor"), module.attr("strided"), {}};
        for (int i = 0; i < kNumDTypes; ++i) {
            auto dtype = static_cast<DType>(i);
            fresh->dtypes.emplace_back(module.attr(name_of(dtype)), dtype);
        }
        torch = fresh;
        return torch;
    }

    bool is_tensor(py::handle object) const {
        return PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(tensor_type.ptr())) != 0;
    }
};

py::object call_method(py::handle object, PyObject* name) {
    return py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object.ptr(), name));
}

py::object checked(py::object object) {
    if (!object) throw py::error_already_set();
    return object;
}

py::object attribute(py::handle object, PyObject* name) {
    return checked(py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name)));
}

// Throws unless this build, and the machine, can work on arrays of a GPU.
void require_device(const std::string& name, const std::string& where) {
#if defined(PYCOMM_CUDA_VERSION)
    static const bool usable = device::count() > 0;
    if (!usable) throw DeviceError(name + " is on " + where + ", which cannot be used: " + device::why_none());
#else
    throw ArgumentError(name + " is on " + where +
                        ", but this build of pycomm has no CUDA kernels: install it from source again where nvcc is on "
                        "PATH (PYCOMM_CUDA=ON pip install --no-cache-dir --force-reinstall --no-deps ...)");
#endif
}

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

Described describe_tensor(const Torch& torch, py::handle tensor, const std::string& name) {
    static PyObject* const kLayout = interned("layout");
    static PyObject* const kIsCpu = interned("is_cpu");
    static PyObject* const kDType = interned("dtype");
    static PyObject* const kNumel = interned("numel");
    static PyObject* const kDataPtr = interned("data_ptr");
    static PyObject* const kIsContiguous = interned("is_contiguous");
    if (!attribute(tensor, kLayout).is(torch.strided)) {
        throw ArgumentError(format("%s has layout %s, wanted torch.strided (dense)", name.c_str(),
                                   py::str(tensor.attr("layout")).cast<std::string>().c_str()));
    }
    Described out;
    if (attribute(tensor, kIsCpu).ptr() != Py_True) {
        std::string device = "device " + py::str(tensor.attr("device")).cast<std::string>();
        if (!tensor.attr("is_cuda").cast<bool>()) {
            throw ArgumentError(name + " is on " + device + ", wanted an array in CPU or CUDA memory");
        }
        require_device(name, device);
        out.array.buffer.device = tensor.attr("get_device")().cast<int>();
    }
    out.array.is_torch = true;
    py::object dtype = attribute(tensor, kDType);
    for (const auto& [object, known] : torch.dtypes) {
        if (dtype.is(object)) out.dtype = known;
    }
    if (!out.dtype) out.dtype_name = py::str(dtype).cast<std::string>();
    out.itemsize = out.dtype ? size_of(*out.dtype) : tensor.attr("element_size")().cast<int64_t>();
    out.contiguous = checked(call_method(tensor, kIsContiguous)).ptr() == Py_True;
    out.writable = true;
    out.array.buffer.count = PyLong_AsLongLong(checked(call_method(tensor, kNumel)).ptr());
    out.array.buffer.data = PyLong_AsVoidPtr(checked(call_method(tensor, kDataPtr)).ptr());
    out.array.owner = py::reinterpret_borrow<py::object>(tensor);
    return out;
}

std::optional<DType> dtype_of_format(std::string format, int64_t itemsize) {
    // numpy writes '=' (native order, standard size) for arrays that are not aligned.
    if (!format.empty() && (format[0] == '=' || format[0] == '@' || format[0] == '<')) format.erase(0, 1);
    if (format == "f") return DType::kF32;
    if (format == "e") return DType::kF16;
    if (format == "d") return DType::kF64;
    if (format == "b") return DType::kI8;
    if (format == "B") return DType::kU8;
    bool is_signed = format == "i" || format == "l" || format == "q";
    if (is_signed && itemsize == 4) return DType::kI32;
    if (is_signed && itemsize == 8) return DType::kI64;
    return std::nullopt;
}

Described describe_buffer(py::handle object) {
    py::buffer_info info = py::reinterpret_borrow<py::buffer>(object).request();
    Described out;
    out.dtype = dtype_of_format(info.format, info.itemsize);
    out.dtype_name = "of format '" + info.format + "'";
    out.itemsize = info.itemsize;
    out.writable = !info.readonly;
    out.contiguous = PyBuffer_IsContiguous(info.view(), 'C') != 0;
    out.array.buffer.count = info.size;
    out.array.buffer.data = info.ptr;
    out.array.owner = py::reinterpret_borrow<py::object>(object);
    return out;
}

// C order without gaps; `strides` in bytes.
bool is_contiguous(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, int64_t itemsize) {
    int64_t expected = itemsize;
    for (size_t i = shape.size(); i-- > 0;) {
        if (shape[i] != 1 && strides[i] != expected) return false;
        expected *= shape[i];
    }
    return true;
}

// https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, versions 0 to 3.
Described describe_cuda_interface(py::handle object, const std::string& name) {
    require_device(name, "a CUDA device");
    py::dict interface = object.attr("__cuda_array_interface__");
    auto shape = interface["shape"].cast<std::vector<int64_t>>();
    auto typestr = interface["typestr"].cast<std::string>();  // such as "<f4"
    auto data = interface["data"].cast<std::pair<uintptr_t, bool>>();
    Described out;
    out.itemsize = std::stoll(typestr.substr(2));
    std::string kind = typestr.substr(1, 1);
    std::string code = kind == "f"   ? (out.itemsize == 2   ? "e"
                                        : out.itemsize == 4 ? "f"
                                                            : "d")
                       : kind == "u" ? (out.itemsize == 1 ? "B" : "?")
                       : kind == "i" ? (out.itemsize == 1 ? "b" : "i")
                                     : "?";
    if (typestr[0] != '>') out.dtype = dtype_of_format(code, out.itemsize);
    // ml_dtypes' bfloat16 has no letter of its own.
    if (typestr == "<V2" &&
        py::str(py::getattr(object, "dtype", py::none())).cast<std::string>().find("bfloat16") != std::string::npos) {
        out.dtype = DType::kBF16;
    }
    out.dtype_name = "'" + typestr + "'";
    out.writable = !data.second;
    out.array.buffer.count = 1;
    for (int64_t length : shape) out.array.buffer.count *= length;
    out.array.buffer.data = reinterpret_cast<void*>(data.first);
    bool strided = interface.contains("strides") && !interface["strides"].is_none();
    out.contiguous = !strided || out.array.buffer.count == 0 ||
                     is_contiguous(shape, interface["strides"].cast<std::vector<int64_t>>(), out.itemsize);
    if (interface.contains("stream") && !interface["stream"].is_none()) {
        auto stream = interface["stream"].cast<uintptr_t>();
        if (stream == 0) throw ArgumentError(name + " names stream 0, which the CUDA array interface forbids");
        out.array.stream = reinterpret_cast<Stream>(stream == 1 ? 0 : stream);  // 1: the legacy default stream
    }
#if defined(PYCOMM_CUDA_VERSION)
    out.array.buffer.device = out.array.buffer.count == 0 ? 0 : device::device_of(out.array.buffer.data);
    if (out.array.buffer.device < 0) throw ArgumentError(name + " claims to be in CUDA memory, but is not");
#endif
    out.array.owner = py::reinterpret_borrow<py::object>(object);
    return out;
}

py::object contiguous_copy(py::handle object, const std::string& name) {
    const Torch* torch = Torch::get();
    if (torch != nullptr && torch->is_tensor(object)) return object.attr("contiguous")();
    if (!py::hasattr(object, "__cuda_array_interface__")) {
        return py::module_::import("numpy").attr("ascontiguousarray")(object);
    }
    if (!py::hasattr(object, "copy")) {
        throw ArgumentError(name + " is not contiguous, and a " + type_name(object) + " cannot copy itself");
    }
    return object.attr("copy")();
}

Described describe(py::handle object, const std::string& name, Access access) {
    const Torch* torch = Torch::get();
    Described out;
    if (torch != nullptr && torch->is_tensor(object)) {
        out = describe_tensor(*torch, object, name);
    } else if (PyObject_CheckBuffer(object.ptr()) != 0) {
        out = describe_buffer(object);
    } else if (py::hasattr(object, "__cuda_array_interface__")) {
        out = describe_cuda_interface(object, name);
    } else if (py::hasattr(object, "__dlpack__")) {
        py::object tensor = py::module_::import("torch").attr("from_dlpack")(object);
        out = describe_tensor(*Torch::get(), tensor, name);
    } else if (py::hasattr(object, "__array_interface__")) {
        out = describe_buffer(py::module_::import("numpy").attr("asarray")(object));  // shares the memory
    } else {
        throw ArgumentTypeError(
            format("%s is a %s, wanted a torch tensor, a numpy or cupy array or an object with __dlpack__, "
                   "__array_interface__ or __cuda_array_interface__",
                   name.c_str(), type_name(object).c_str()));
    }
    if (access == Access::kWrite && !out.writable) {
        throw ArgumentError(format("%s is read-only, wanted an array to write to", name.c_str()));
    }
    if (!out.contiguous) {
        if (access == Access::kRead) return describe(contiguous_copy(object, name), name, access);
        throw ArgumentError(format("%s is not contiguous, wanted a contiguous array to write to", name.c_str()));
    }
    return out;
}

}  // namespace

Array as_array(py::handle object, const std::string& name, Access access) {
    Described described = describe(object, name, access);
    if (!described.dtype) {
        throw ArgumentTypeError(
            format("%s has dtype %s, wanted one of float32, float16, bfloat16, float64, int8, uint8, "
                   "int32, int64",
                   name.c_str(), described.dtype_name.c_str()));
    }
    described.array.buffer.dtype = *described.dtype;
    return std::move(described.array);
}

Array as_movable(py::handle object, const std::string& name, Access access) {
    Described described = describe(object, name, access);
    described.array.buffer.dtype = described.dtype.value_or(DType::kU8);
    if (!described.dtype) described.array.buffer.count *= described.itemsize;
    return std::move(described.array);
}

std::vector<Array> as_arrays(py::handle sequence, const std::string& name, Access access) {
    auto fast = py::reinterpret_steal<py::object>(PySequence_Fast(sequence.ptr(), ""));
    if (!fast || py::isinstance<py::str>(sequence)) {
        PyErr_Clear();
        throw ArgumentTypeError(
            format("%s is a %s, wanted a sequence of arrays", name.c_str(), type_name(sequence).c_str()));
    }
    Py_ssize_t size = PySequence_Fast_GET_SIZE(fast.ptr());
    if (size == 0) throw ArgumentError(format("%s is empty, wanted at least one array", name.c_str()));
    std::vector<Array> out;
    out.reserve(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
        out.push_back(as_array(PySequence_Fast_GET_ITEM(fast.ptr(), i), name + "[" + std::to_string(i) + "]", access));
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
