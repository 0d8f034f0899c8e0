#include "base/error.h"
#include "bindings/described.h"
#include "bindings/dlpack.h"
#include "bindings/scalars.h"
#include "device/runtime.h"

namespace pycomm {
namespace {

// torch, if the process has imported it; a tensor cannot exist otherwise.
struct Torch {
    py::object tensor_type, parameter_type, strided, ordinary_dispatch;
    std::vector<std::pair<py::object, DType>> dtypes;
    const DLPackExchangeAPI* table;

    static const Torch* get() {
        static Torch* torch = nullptr;  // leaked: Python objects must not die after the interpreter
        if (torch != nullptr) return torch;
        py::dict modules = py::module_::import("sys").attr("modules");
        if (!modules.contains("torch")) return nullptr;
        py::object module = modules["torch"];
        if (!py::hasattr(module, "Tensor") || !py::hasattr(module, "strided")) return nullptr;  // half imported
        if (!py::hasattr(module, "nn")) return nullptr;
        py::object tensor = module.attr("Tensor");
        auto* fresh = new Torch{tensor,
                                module.attr("nn").attr("Parameter"),
                                module.attr("strided"),
                                tensor.attr("__torch_dispatch__"),
                                {},
                                table_of(tensor)};
        for (int i = 0; i < kNumDTypes; ++i) {
            auto dtype = static_cast<DType>(i);
            fresh->dtypes.emplace_back(module.attr(name_of(dtype)), dtype);
        }
        torch = fresh;
        return torch;
    }

    static const DLPackExchangeAPI* table_of(const py::object& tensor_type) {
        py::object capsule = py::getattr(tensor_type, "__dlpack_c_exchange_api__", py::none());
        if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0) return nullptr;
        auto table = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
        return table->header.major == 1 && table->dltensor_from_py_object_no_sync != nullptr ? table : nullptr;
    }

    bool is_tensor(py::handle object) const {
        return PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(tensor_type.ptr())) != 0;
    }

    // A tensor that redefines its operations (a DTensor, a FakeTensor) has its numbers elsewhere.
    bool is_wrapper(py::handle tensor) const {
        auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
        if (type == tensor_type.ptr() || type == parameter_type.ptr()) return false;
        py::object dispatch = py::handle(type).attr("__torch_dispatch__");
        return !dispatch.is(ordinary_dispatch);
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

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

// Address of the elements. A tensor may have none: it was freed, or is a placeholder of functorch or a tracer.
void* address_of(py::handle tensor, const std::string& name, int64_t count) {
    static PyObject* const kDataPtr = interned("data_ptr");
    py::object address = call_method(tensor, kDataPtr);
    if (!address) PyErr_Clear();
    void* data = address ? PyLong_AsVoidPtr(address.ptr()) : nullptr;
    if (data == nullptr && count > 0) {
        throw ArgumentTypeError(name + " has no memory: it was freed, or is a placeholder");
    }
    return data;
}

}  // namespace

bool is_tensor(py::handle object) {
    const Torch* torch = Torch::get();
    return torch != nullptr && torch->is_tensor(object);
}

bool is_ordinary_tensor(py::handle object) {
    const Torch* torch = Torch::get();
    return torch != nullptr && torch->is_tensor(object) && !torch->is_wrapper(object);
}

const DLPackExchangeAPI* torchs_table() {
    const Torch* torch = Torch::get();
    return torch == nullptr ? nullptr : torch->table;
}

Described describe_tensor(py::handle tensor, const std::string& name) {
    const Torch& torch = *Torch::get();
    static PyObject* const kLayout = interned("layout");
    static PyObject* const kIsCpu = interned("is_cpu");
    static PyObject* const kDType = interned("dtype");
    static PyObject* const kNumel = interned("numel");
    static PyObject* const kIsContiguous = interned("is_contiguous");
    static PyObject* const kIsConj = interned("is_conj");
    static PyObject* const kIsNeg = interned("is_neg");
    if (torch.is_wrapper(tensor)) {
        throw ArgumentTypeError(name + " is a " + type_name(tensor) +
                                ", a tensor wrapped around others, wanted an ordinary one");
    }
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
    // Complex tensors have no known dtype. The imaginary part of a conjugated one has, and its neg bit is set.
    out.lazy = checked(call_method(tensor, kIsNeg)).ptr() == Py_True ||
               (!out.dtype && checked(call_method(tensor, kIsConj)).ptr() == Py_True);
    out.array.buffer.count = PyLong_AsLongLong(checked(call_method(tensor, kNumel)).ptr());
    out.array.buffer.data = address_of(tensor, name, out.array.buffer.count);
    out.array.owner = py::reinterpret_borrow<py::object>(tensor);
    return out;
}

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

}  // namespace pycomm
