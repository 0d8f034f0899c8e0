// Python's arrays as Buffers. Torch tensors are asked directly (a handful of attribute reads, no
// DLPack capsule), numpy and its like through the buffer protocol, cupy and its like through the CUDA array interface,
// everything else through torch.from_dlpack or numpy's array interface.
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
    std::shared_ptr<py::buffer_info> exported;  // what has a view taken of it does not give its memory back
    int64_t unit = 1;              // of the buffer's elements, that make one of the array's: more where they are bytes
    bool is_torch = false;         // its producer's stream is torch's current one
    std::optional<Stream> stream;  // that its CUDA array interface names

    bool on_device() const { return buffer.device != Buffer::kHost; }
};

enum class Access {
    kRead,   // one that is not contiguous, or has its conj or neg bit set, is copied first
    kWrite,  // must be contiguous and writable
};

// Throws ArgumentTypeError / ArgumentError naming `name`, what came and what was wanted; OutOfMemory where a copy is
// needed and too large; DeviceError if the array is on a GPU that cannot be used.
Array as_array(py::handle object, const std::string& name, Access access);
// The same for arrays that are only moved: any dtype, as bytes where the kernels do not know it.
Array as_movable(py::handle object, const std::string& name, Access access);

// Number and type of the elements; nothing is copied.
std::pair<int64_t, DType> look(py::handle object, const std::string& name);

std::vector<Array> as_arrays(py::handle sequence, const std::string& name, Access access);
// One array of the host's memory for each of `size` ranks, as as_movable has them; None stands for an empty one.
std::vector<Array> as_parts(py::handle sequence, const std::string& name, Access access, int size);
std::vector<Buffer> buffers_of(const std::vector<Array>& arrays);

DType dtype_named(const std::string& name);

void require_floating(const Buffer& buffer, const std::string& name);
// ArgumentError for an array that is not in the host's memory.
void require_host(const Array& array, const std::string& name);

std::string device_name(int device);  // "cpu", "cuda:0"

}  // namespace pycomm
