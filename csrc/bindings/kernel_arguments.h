// Shared by the bindings of kernels: checks of arrays, factors, and the choice of the device.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/device_call.h"
#include "bindings/scalars.h"
#include "kernels/on_device.h"

namespace pycomm {

// Calls gpu(DeviceCall&) if the arguments lie on a GPU, else cpu(), which does not hold the interpreter's lock. gpu
// does: it takes a few microseconds, and another thread may keep a lock that it is given for milliseconds. gpu takes
// `auto&`, so that it is not compiled where there are no CUDA kernels to link with.
template <class Gpu, class Cpu>
void dispatch(const Arguments& arguments, [[maybe_unused]] Gpu&& gpu, Cpu&& cpu) {
    if constexpr (kHasCuda) {
        if (arguments.device() != Buffer::kHost) {
            DeviceCall call(arguments);
            gpu(call);
            return call.finish();
        }
    }
    py::gil_scoped_release release;
    cpu();
}

// A number, or an array with one float32 that may lie on a GPU; divided by such an array, unless that is None. Or a
// tuple of such a factor, an array with the largest magnitude, the exponent of the room for it, and whether to divide
// by the power of two that fits it: pycomm.kernels.FittingScale.
class Factor {
   public:
    explicit Factor(py::handle object, const char* name = "scale", py::handle divisor = py::none());

    void add_to(Arguments& arguments) const;
    // For the kernels of each device. on_cpu() throws ArgumentError if the factor lies on a GPU.
    cuda::Scale on_gpu() const { return scale_; }
    double on_cpu() const;

   private:
    void take(py::handle object);

    const char* name_;
    cuda::Scale scale_;
    Array array_, divisor_, largest_;
};

// "tensors[3]"
std::string name_of_item(const std::string& name, size_t index);

// ArgumentTypeError or ArgumentError unless `buffer` has the dtype and the count of `wanted`, or this count.
void require_same(const Buffer& buffer, const std::string& name, const Buffer& wanted, const char* wanted_name);
void require_count(int64_t count, int64_t wanted, const std::string& name, const char* of_what);
void require_aligned(const Buffer& buffer, const std::string& name);
void require_all_floating(const std::vector<Buffer>& buffers, const std::string& name);
// ArgumentError unless `flat` has as many elements as all parts together; all are of floating types.
void require_total(const std::vector<Buffer>& parts, const char* parts_name, const Buffer& flat, const char* flat_name);

// A 0-d array that a kernel writes its answer to, or reads another one's answer from.
Array as_answer(py::handle object, const std::string& name, int64_t itemsize, Access access = Access::kWrite);
// An array of `count` elements of one type, aligned to them.
Array as_exactly(py::handle object, const std::string& name, Access access, DType dtype, int64_t count,
                 const char* of_what);
// An array of any number of float32, aligned to them. `wanted`: what requires that, for errors.
Array as_floats(py::handle object, const char* name, Access access, const char* wanted = "required here");
// The array for what a kernel leaves of x; it may be x itself. For None an empty one, whose data is null.
Array as_remainder(const py::object& object, const Array& x);
// To be called when x has been added.
void add_remainder(Arguments& arguments, const Array& remainder, const Array& x);

// Excuses the parts that already lie at their places in the flat array, with its type.
void excuse_in_place(Arguments& arguments, const std::vector<Array>& parts, const Array& flat);

// Pointers to the elements of arrays that must all have the same dtype and count.
template <class T>
std::vector<const T*> pointers_of(const std::vector<Array>& arrays, const std::string& name, DType dtype, int64_t count,
                                  const char* of_what) {
    std::vector<const T*> pointers;
    for (size_t p = 0; p < arrays.size(); ++p) {
        const std::string each = name_of_item(name, p);
        require_same(arrays[p].buffer, each, Buffer{nullptr, arrays[p].buffer.count, dtype}, of_what);
        require_count(arrays[p].buffer.count, count, each, of_what);
        require_aligned(arrays[p].buffer, each);
        pointers.push_back(static_cast<const T*>(arrays[p].buffer.data));
    }
    return pointers;
}

}  // namespace pycomm
