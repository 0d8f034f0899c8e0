#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/described.h"
#include "bindings/scalars.h"
#include "device/runtime.h"

namespace pycomm {
namespace {

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

// Torch's name for it, where torch has such a type.
std::string name_of_format(const std::string& format, int64_t itemsize) {
    std::string letter = format;
    if (!letter.empty() && (letter[0] == '=' || letter[0] == '@' || letter[0] == '<')) letter.erase(0, 1);
    if (letter == "?") return "torch.bool";
    if (letter == "h") return "torch.int16";
    if (letter == "H") return "torch.uint16";
    if (letter == "I" || letter == "L" || letter == "Q") return itemsize == 4 ? "torch.uint32" : "torch.uint64";
    if (letter == "Zf") return "torch.complex64";
    if (letter == "Zd") return "torch.complex128";
    return "of format '" + format + "'";
}

// Returns whether there are addresses among the elements: objects, or pointers.
bool holds_addresses(const std::string& format) {
    bool in_name = false;
    for (char c : format) {
        if (c == ':') in_name = !in_name;
        if (!in_name && (c == 'O' || c == 'P' || c == '&' || c == 'X')) return true;
    }
    return false;
}

// C order without gaps; `strides` in bytes.
bool is_contiguous(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, int64_t itemsize) {
    int64_t expected = itemsize;
    if (shape.size() != strides.size()) return false;
    for (size_t i = shape.size(); i-- > 0;) {
        if (shape[i] != 1 && strides[i] != expected) return false;
        expected *= shape[i];
    }
    return true;
}

// Returns whether the producer says so (DLPack 1.0); torch would treat the array as writable.
bool is_read_only(py::handle capsule) {
    constexpr const char* kName = "dltensor_versioned";
    if (PyCapsule_IsValid(capsule.ptr(), kName) == 0) return false;
    struct Managed {  // the beginning of DLManagedTensorVersioned
        uint32_t major, minor;
        void* context;
        void (*deleter)(void*);
        uint64_t flags;
    };
    constexpr uint64_t kReadOnly = 1;
    return (static_cast<const Managed*>(PyCapsule_GetPointer(capsule.ptr(), kName))->flags & kReadOnly) != 0;
}

bool is_on_device(py::handle object) {
    constexpr int kCpu = 1;
    if (!py::hasattr(object, "__dlpack_device__")) return false;
    return object.attr("__dlpack_device__")().cast<std::pair<int, int>>().first != kCpu;
}

// Ctrl-C during a foreign method is not that method's error.
void pass_interruption_on(py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw error;
}

// https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, versions 0 to 3.
Described read_cuda_interface(py::handle object, const std::string& name) {
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
    for (int64_t length : shape) {
        if (length >= 0 && !__builtin_mul_overflow(out.array.buffer.count, length, &out.array.buffer.count)) continue;
        throw ArgumentError(name + " has an impossible shape");
    }
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

}  // namespace

std::string reason(py::error_already_set& error) {
    return type_name(error.value()) + ": " + py::str(error.value()).cast<std::string>();
}

Described describe_buffer(py::handle object, const std::string& name) {
    auto exported = std::make_shared<py::buffer_info>();
    try {
        *exported = py::reinterpret_borrow<py::buffer>(object).request();
    } catch (py::error_already_set& error) {
        pass_interruption_on(error);
        throw ArgumentTypeError(name + " is a " + type_name(object) +
                                " whose buffer cannot be exported: " + reason(error));
    }
    const py::buffer_info& info = *exported;
    if (holds_addresses(info.format)) {
        throw ArgumentTypeError(name + " holds Python objects or pointers (format '" + info.format +
                                "'), wanted numbers");
    }
    Described out;
    out.dtype = dtype_of_format(info.format, info.itemsize);
    out.dtype_name = name_of_format(info.format, info.itemsize);
    out.itemsize = info.itemsize;
    out.writable = !info.readonly;
    out.contiguous = PyBuffer_IsContiguous(info.view(), 'C') != 0;
    out.array.buffer.count = info.size;
    out.array.buffer.data = info.ptr;
    out.array.owner = py::reinterpret_borrow<py::object>(object);
    out.array.exported = std::move(exported);
    return out;
}

Described describe_array_interface(py::handle object, const std::string& name) {
    try {
        py::object interface = object.attr("__array_interface__");
        bool has_address = py::isinstance<py::dict>(interface) && interface.contains("data") &&
                           py::isinstance<py::tuple>(py::object(interface["data"]));
        if (!has_address) {  // numpy also accepts bytes, but does not check their number
            throw ArgumentTypeError(name + " is a " + type_name(object) + " whose __array_interface__ has no address");
        }
        py::object array = py::module_::import("numpy").attr("asarray")(object);  // shares the memory
        return describe_buffer(array, name);
    } catch (py::error_already_set& error) {
        pass_interruption_on(error);
        throw ArgumentTypeError(name + " is a " + type_name(object) +
                                " whose __array_interface__ fails: " + reason(error));
    }
}

Described describe_cuda_interface(py::handle object, const std::string& name) {
    require_device(name, "a CUDA device");
    try {
        return read_cuda_interface(object, name);
    } catch (py::error_already_set& error) {
        pass_interruption_on(error);
        throw ArgumentTypeError(name + " is a " + type_name(object) +
                                " whose __cuda_array_interface__ fails: " + reason(error));
    } catch (const std::logic_error& error) {  // from std::stoll, and from substr of a short string
        if (dynamic_cast<const ArgumentError*>(&error) != nullptr) throw;
        throw ArgumentTypeError(name + " has a malformed __cuda_array_interface__");
    } catch (const py::cast_error&) {
        throw ArgumentTypeError(name + " has a malformed __cuda_array_interface__");
    }
}

Described describe_dlpack(py::handle object, const std::string& name) {
    try {
        py::object from_dlpack = py::module_::import("torch.utils.dlpack").attr("from_dlpack");
        if (is_on_device(object)) return describe_tensor(from_dlpack(object), name);  // handles streams
        py::object capsule;
        try {
            capsule = object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0));
        } catch (py::error_already_set& error) {
            if (!error.matches(PyExc_TypeError)) throw;
            capsule = object.attr("__dlpack__")();  // an object from before DLPack had versions
        }
        bool read_only = is_read_only(capsule);
        py::object tensor;
        try {
            tensor = from_dlpack(capsule);
        } catch (py::error_already_set& error) {
            // Older releases of torch take no capsule that has a version.
            if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") == 0 || !error.matches(PyExc_Exception)) throw;
            tensor = from_dlpack(object.attr("__dlpack__")());
        }
        Described out = describe_tensor(tensor, name);
        out.writable = !read_only;
        return out;
    } catch (py::error_already_set& error) {
        pass_interruption_on(error);
        throw ArgumentTypeError(name + " is a " + type_name(object) + " whose __dlpack__ fails: " + reason(error));
    } catch (const py::cast_error&) {
        throw ArgumentTypeError(name + " is a " + type_name(object) + " whose __dlpack_device__ is malformed");
    }
}

}  // namespace pycomm
