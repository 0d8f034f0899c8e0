// Python's arrays as Buffers. Torch tensors are read directly (a handful of attributes, no DLPack capsule), numpy and
// its like through the buffer protocol, cupy and its like through the CUDA array interface, everything else through
// torch.from_dlpack or numpy's array interface.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "device/stream.h"

namespace pycomm {

namespace py = pybind11;

// A Buffer and what keeps its memory alive. To be destroyed with the interpreter's lock held.
struct Array {
    Buffer buffer;
    py::object owner;
    std::shared_ptr<py::buffer_info> exported;  // a view, which keeps the exporter from freeing its memory
    int64_t unit = 1;              // buffer elements per array element; more than 1 only for bytes of an unknown dtype
    bool is_torch = false;         // produced on torch's current stream
    std::optional<Stream> stream;  // the one its CUDA array interface names

    bool on_device() const { return buffer.device != Buffer::kHost; }
};

enum class Access {
    kRead,   // copied first if it is not contiguous, or has its conj or neg bit set
    kWrite,  // must be contiguous and writable
};

// Throws ArgumentTypeError / ArgumentError naming `name`, what came and what was wanted; OutOfMemory where a copy is
// needed and too large; DeviceError if the array is on a GPU that cannot be used.
Array as_array(py::handle object, const std::string& name, Access access);
// The same for arrays that are only moved: any dtype, as bytes if the kernels do not know it.
Array as_movable(py::handle object, const std::string& name, Access access);

// Number and type of the elements; nothing is copied.
std::pair<int64_t, DType> look(py::handle object, const std::string& name);

std::vector<Array> as_arrays(py::handle sequence, const std::string& name, Access access);
// One array in host memory for each of `size` ranks, read as by as_movable; None stands for an empty one.
std::vector<Array> as_parts(py::handle sequence, const std::string& name, Access access, int size);
std::vector<Buffer> buffers_of(const std::vector<Array>& arrays);

DType dtype_named(const std::string& name);

void require_floating(const Buffer& buffer, const std::string& name);
// ArgumentError for an array that is not in the host's memory.
void require_host(const Array& array, const std::string& name);

std::string device_name(int device);  // "cpu", "cuda:0"

}  // namespace pycomm
