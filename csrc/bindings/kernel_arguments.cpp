#include "bindings/kernel_arguments.h"

#include <cmath>
#include <cstring>

#include "bindings/bindings.h"

namespace pycomm {

Factor::Factor(py::handle object, const char* name, py::handle divisor) : name_(name) {
    if (!divisor.is_none()) {
        divisor_ = as_exactly(divisor, "divisor", Access::kRead, DType::kF32, 1, "one float32");
        scale_.divisor = static_cast<const float*>(divisor_.buffer.data);
    }
    if (!PyTuple_Check(object.ptr())) {
        take(object);
        return;
    }
    auto parts = py::reinterpret_borrow<py::tuple>(object);
    if (parts.size() != 4) throw ArgumentTypeError(std::string(name) + " is a tuple, wanted a FittingScale");
    largest_ = as_exactly(parts[1], "largest", Access::kRead, DType::kF32, 1, "one float32");
    scale_.largest = static_cast<const float*>(largest_.buffer.data);
    scale_.room = parts[2].cast<int>();
    scale_.unfits = parts[3].cast<bool>();
    take(parts[0]);
}

void Factor::take(py::handle object) {
    const char* name = name_;
    bool number = PyFloat_Check(object.ptr()) || PyLong_Check(object.ptr());
    if (number && !PyBool_Check(object.ptr())) {
        scale_.value = as_number(object, name);
        return;
    }
    if (object.is_none() || PyBool_Check(object.ptr())) {
        throw ArgumentTypeError(std::string(name) + " is " + shown(object) + ", wanted a number, or one float32");
    }
    array_ = as_array(object, name, Access::kRead);
    require_same(array_.buffer, name, Buffer{nullptr, 1, DType::kF32}, "a number, or one float32");
    if (array_.on_device()) {
        scale_.on_device = static_cast<const float*>(array_.buffer.data);
    } else {
        float value;  // it may not be aligned
        std::memcpy(&value, array_.buffer.data, sizeof value);
        scale_.value = value;
    }
}

void Factor::add_to(Arguments& arguments) const {
    if (scale_.divisor != nullptr) arguments.reads(divisor_, "divisor");
    if (scale_.largest != nullptr) arguments.reads(largest_, "largest");
    if (scale_.on_device != nullptr) {
        arguments.reads(array_, name_);
    } else {
        arguments.was_read(array_, name_);
    }
}

double Factor::on_cpu() const {
    if (scale_.on_device == nullptr) {
        double value = scale_.divisor == nullptr ? scale_.value : scale_.value / *scale_.divisor;
        if (scale_.largest == nullptr) return value;
        uint32_t bits;
        std::memcpy(&bits, scale_.largest, sizeof bits);
        const int exponent = cuda::fitting_exponent(bits, scale_.room);
        return std::ldexp(value, scale_.unfits ? -exponent : exponent);
    }
    throw ArgumentError(std::string(name_) + " is on " + device_name(array_.buffer.device) +
                        ", the other arrays on cpu");
}

std::string name_of_item(const std::string& name, size_t index) { return name + "[" + std::to_string(index) + "]"; }

void require_same(const Buffer& buffer, const std::string& name, const Buffer& wanted, const char* wanted_name) {
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

void require_count(int64_t count, int64_t wanted, const std::string& name, const char* of_what) {
    if (count == wanted) return;
    throw ArgumentError(format("%s has %lld elements, wanted %lld: %s", name.c_str(), static_cast<long long>(count),
                               static_cast<long long>(wanted), of_what));
}

void require_aligned(const Buffer& buffer, const std::string& name) {
    if (buffer.count == 0) return;
    if (reinterpret_cast<uintptr_t>(buffer.data) % static_cast<uintptr_t>(size_of(buffer.dtype)) == 0) return;
    throw ArgumentError(name + " is not aligned to its elements");
}

void require_all_floating(const std::vector<Buffer>& buffers, const std::string& name) {
    for (size_t j = 0; j < buffers.size(); ++j) require_floating(buffers[j], name_of_item(name, j));
}

void require_total(const std::vector<Buffer>& parts, const char* parts_name, const Buffer& flat,
                   const char* flat_name) {
    int64_t total = 0;
    require_all_floating(parts, parts_name);
    for (const Buffer& part : parts) total += part.count;
    require_floating(flat, flat_name);
    const std::string wanted = std::string("the sum over ") + parts_name;
    require_count(flat.count, total, flat_name, wanted.c_str());
}

Array as_answer(py::handle object, const std::string& name, int64_t itemsize, Access access) {
    Array array = as_movable(object, name, access);
    if (array.buffer.num_bytes() == itemsize) return array;
    throw ArgumentError(format("%s has %lld bytes, wanted one element of %lld", name.c_str(),
                               static_cast<long long>(array.buffer.num_bytes()), static_cast<long long>(itemsize)));
}

Array as_exactly(py::handle object, const std::string& name, Access access, DType dtype, int64_t count,
                 const char* of_what) {
    Array array = as_array(object, name, access);
    require_same(array.buffer, name, Buffer{nullptr, array.buffer.count, dtype}, of_what);
    require_count(array.buffer.count, count, name, of_what);
    require_aligned(array.buffer, name);
    return array;
}

Array as_floats(py::handle object, const char* name, Access access, const char* wanted) {
    Array array = as_array(object, name, access);
    require_same(array.buffer, name, Buffer{nullptr, array.buffer.count, DType::kF32}, wanted);
    require_aligned(array.buffer, name);
    return array;
}

Array as_remainder(const py::object& object, const Array& x) {
    if (object.is_none()) return {};
    Array remainder = as_array(object, "remainder", Access::kWrite);
    require_same(remainder.buffer, "remainder", x.buffer, "x");
    require_aligned(remainder.buffer, "remainder");
    return remainder;
}

void add_remainder(Arguments& arguments, const Array& remainder, const Array& x) {
    arguments.writes(remainder, "remainder");
    arguments.may_be(remainder, x);
}

void excuse_in_place(Arguments& arguments, const std::vector<Array>& parts, const Array& flat) {
    std::vector<const Array*> in_place;
    const char* place = flat.buffer.bytes();
    for (const Array& part : parts) {
        bool there = part.buffer.dtype == flat.buffer.dtype && part.buffer.bytes() == place;
        if (there && part.buffer.count > 0) in_place.push_back(&part);
        place += part.buffer.count * size_of(flat.buffer.dtype);
    }
    arguments.excuse(in_place);
}

void bind_kernel_arguments(py::module_& module) {
    py::class_<Scratch>(module, "Scratch").def(py::init<>());
    module.def(
        "look",
        [](py::handle array, const std::string& name) {
            auto [count, dtype] = look(array, name);
            return std::pair{count, std::string(name_of(dtype))};
        },
        py::arg("array"), py::arg("name"));
}

}  // namespace pycomm
