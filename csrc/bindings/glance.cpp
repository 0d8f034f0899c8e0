#include "bindings/glance.h"

#include <exception>
#include <optional>
#include <vector>

#include "bindings/described.h"
#include "bindings/dlpack.h"
#include "device/runtime.h"

namespace pycomm {
namespace {

bool can_use_gpus() {
#if defined(PYCOMM_CUDA_VERSION)
    static const bool usable = device::count() > 0;
    return usable;
#else
    return false;
#endif
}

std::optional<DType> known(DLDataType type) {
    constexpr uint8_t kInt = 0, kUnsigned = 1, kFloat = 2, kBFloat = 4;
    if (type.lanes != 1) return std::nullopt;
    switch (type.code << 8 | type.bits) {
        case kFloat << 8 | 32:
            return DType::kF32;
        case kFloat << 8 | 16:
            return DType::kF16;
        case kBFloat << 8 | 16:
            return DType::kBF16;
        case kFloat << 8 | 64:
            return DType::kF64;
        case kInt << 8 | 8:
            return DType::kI8;
        case kUnsigned << 8 | 8:
            return DType::kU8;
        case kInt << 8 | 32:
            return DType::kI32;
        case kInt << 8 | 64:
            return DType::kI64;
        default:
            return std::nullopt;
    }
}

// By torch's table of C functions (torch 2.10 and later).
bool glance_by_table(const DLPackExchangeAPI& table, PyObject* tensor, Glance& out) {
    constexpr int kCpu = 1, kCuda = 2;
    DLTensor seen;
    if (table.dltensor_from_py_object_no_sync(tensor, &seen) != 0) return false;
    std::optional<DType> dtype = known(seen.dtype);
    if (!dtype || (seen.device.type != kCpu && seen.device.type != kCuda)) return false;
    if (seen.ndim > 0 && (seen.shape == nullptr || seen.strides == nullptr)) return false;
    int64_t count = 1;
    for (int d = 0; d < seen.ndim; ++d) count *= seen.shape[d];
    int device = seen.device.type == kCpu ? Buffer::kHost : seen.device.id;
    out = {
        {static_cast<char*>(seen.data) + seen.byte_offset, count, *dtype, device}, seen.ndim, seen.shape, seen.strides};
    return true;
}

bool read_tuple(py::object tuple, std::vector<int64_t>& out) {
    if (!tuple || PyTuple_Check(tuple.ptr()) == 0) return false;
    for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(tuple.ptr()); ++d) {
        out.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), d)));
    }
    return PyErr_Occurred() == nullptr;
}

bool glance_by_attributes(PyObject* tensor, Glance& out) {
    static std::vector<int64_t> dimensions;  // the interpreter's lock is held
    dimensions.clear();
    py::object shape = py::reinterpret_steal<py::object>(PyObject_GetAttrString(tensor, "shape"));
    py::object strides = py::reinterpret_steal<py::object>(PyObject_CallMethod(tensor, "stride", nullptr));
    if (!read_tuple(shape, dimensions) || !read_tuple(strides, dimensions)) return false;
    Described described = describe_tensor(tensor, "tensor");
    if (!described.dtype) return false;
    out.buffer = described.array.buffer;
    out.buffer.dtype = *described.dtype;
    out.ndim = static_cast<int>(dimensions.size() / 2);
    out.shape = dimensions.data();
    out.strides = dimensions.data() + out.ndim;
    return true;
}

bool is_negated(PyObject* tensor) {
    static PyObject* const kIsNeg = PyUnicode_InternFromString("is_neg");
    auto negated = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor, kIsNeg));
    return negated.ptr() != Py_False;
}

}  // namespace

bool Glance::is_contiguous() const {
    int64_t stride = 1;
    for (int d = ndim - 1; d >= 0; --d) {
        if (shape[d] != 1 && strides[d] != stride) return buffer.count == 0;
        stride *= shape[d];
    }
    return true;
}

bool Glance::lies_like(int ndim_, const int64_t* shape_, const int64_t* strides_) const {
    if (ndim != ndim_) return false;
    for (int d = 0; d < ndim; ++d) {
        if (shape[d] != shape_[d]) return false;
        if (shape[d] > 1 && strides[d] != strides_[d] && buffer.count > 0) return false;
    }
    return true;
}

bool glance(PyObject* object, Glance& out, bool is_plain) {
    if (!is_ordinary_tensor(object)) return false;
    const DLPackExchangeAPI* table = torchs_table();
    bool seen = false;
    try {
        seen = (is_plain || !is_negated(object)) &&
               (table != nullptr ? glance_by_table(*table, object, out) : glance_by_attributes(object, out));
    } catch (const std::exception&) {  // as_array reports the reason
        seen = false;
    }
    if (!seen) PyErr_Clear();
    if (!seen || (out.buffer.data == nullptr && out.buffer.count > 0)) return false;
    return out.buffer.device == Buffer::kHost || can_use_gpus();
}

}  // namespace pycomm
