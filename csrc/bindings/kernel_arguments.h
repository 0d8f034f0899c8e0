// What the bindings of kernels have in common: checks, answers, factors.
#pragma once

#include <cstring>
#include <string>

#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/device_call.h"
#include "bindings/scalars.h"
#include "kernels/on_device.h"

namespace pycomm {

template <class F>
void without_gil(F&& f) {
    py::gil_scoped_release release;
    f();
}

inline void require_same(const Buffer& buffer, const std::string& name, const Buffer& wanted, const char* wanted_name) {
    if (buffer.dtype != wanted.dtype) {
        throw ArgumentTypeError(format("%s has dtype %s, wanted %s as %s", name.c_str(), name_of(buffer.dtype),
                                       name_of(wanted.dtype), wanted_name));
    }
    if (buffer.count != wanted.count) {
        throw ArgumentError(format("%s has %lld elements, wanted %lld as %s", name.c_str(),
                                   static_cast<long long>(buffer.count), static_cast<long long>(wanted.count),
                                   wanted_name));
    }
}

// A 0-d array that a kernel writes its answer to, or another one's that it reads.
inline Array as_answer(py::handle object, const std::string& name, int64_t itemsize, Access access = Access::kWrite) {
    Array array = as_movable(object, name, access);
    if (array.buffer.num_bytes() == itemsize) return array;
    throw ArgumentError(format("%s has %lld bytes, wanted one element of %lld", name.c_str(),
                               static_cast<long long>(array.buffer.num_bytes()), static_cast<long long>(itemsize)));
}

// A factor: a number, or an array with one float32 that may lie on a GPU.
struct Factor {
    cuda::Scale scale;
    Array array;

    explicit Factor(py::handle object) {
        bool number = PyFloat_Check(object.ptr()) || PyLong_Check(object.ptr());
        if (number && !PyBool_Check(object.ptr())) {
            scale.value = as_number(object, "scale");
            return;
        }
        if (object.is_none() || PyBool_Check(object.ptr())) {
            throw ArgumentTypeError("scale is " + shown(object) + ", wanted a number, or one float32");
        }
        array = as_array(object, "scale", Access::kRead);
        require_same(array.buffer, "scale", Buffer{nullptr, 1, DType::kF32}, "a number, or one float32");
        if (array.on_device()) {
            scale.on_device = static_cast<const float*>(array.buffer.data);
        } else {
            float value;  // it may not be aligned
            std::memcpy(&value, array.buffer.data, sizeof value);
            scale.value = value;
        }
    }

    void add_to(Arguments& arguments) const {
        if (scale.on_device != nullptr) {
            arguments.reads(array, "scale");
        } else {
            arguments.was_read(array, "scale");
        }
    }
};

// Parts that already lie at their places in the flat array, with its type.
inline void excuse_in_place(Arguments& arguments, const std::vector<Array>& parts, const Array& flat) {
    std::vector<const Array*> in_place;
    const char* place = flat.buffer.bytes();
    for (const Array& part : parts) {
        bool there = part.buffer.dtype == flat.buffer.dtype && part.buffer.bytes() == place;
        if (there && part.buffer.count > 0) in_place.push_back(&part);
        place += part.buffer.count * size_of(flat.buffer.dtype);
    }
    arguments.excuse(in_place);
}

inline bool on_gpu(const Arguments& arguments) { return arguments.device() != Buffer::kHost; }

inline void require_number(const Factor& factor) {
    if (factor.scale.on_device == nullptr) return;
    throw ArgumentError("scale is on " + device_name(factor.array.buffer.device) + ", the other arrays on cpu");
}

inline void require_count(int64_t count, int64_t wanted, const std::string& name, const char* of_what) {
    if (count == wanted) return;
    throw ArgumentError(format("%s has %lld elements, wanted %lld: %s", name.c_str(), static_cast<long long>(count),
                               static_cast<long long>(wanted), of_what));
}

inline void require_aligned(const Buffer& buffer, const std::string& name) {
    if (buffer.count == 0) return;
    if (reinterpret_cast<uintptr_t>(buffer.data) % static_cast<uintptr_t>(size_of(buffer.dtype)) == 0) return;
    throw ArgumentError(name + " is not aligned to its elements");
}

// An array of `count` elements of one type, as `name` wants it.
inline Array as_exactly(py::handle object, const std::string& name, Access access, DType dtype, int64_t count,
                        const char* of_what) {
    Array array = as_array(object, name, access);
    require_same(array.buffer, name, Buffer{nullptr, array.buffer.count, dtype}, of_what);
    require_count(array.buffer.count, count, name, of_what);
    require_aligned(array.buffer, name);
    return array;
}

}  // namespace pycomm
