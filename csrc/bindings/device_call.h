// One call of a kernel on a GPU: which device, which stream, which scratch memory.
#pragma once

#include <pybind11/pybind11.h>

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "device/runtime.h"
#include "kernels/on_device.h"

namespace pycomm {

#if defined(PYCOMM_CUDA_VERSION)
inline constexpr bool kHasCuda = true;
#else
inline constexpr bool kHasCuda = false;
#endif

struct Scratch;
Scratch* scratch_of(py::handle object);  // null for None

// Scratch memory that a caller keeps from call to call. It grows as needed, in the library of the arrays at hand; not
// while the stream is captured into a CUDA graph. What a graph uses stays: it is launched whenever its owner likes.
struct Scratch {
    cuda::Workspace workspace;
    py::object owner;
    int device = Buffer::kHost;
    bool in_graph = false;           // of some graph, which writes tables of its own to it
    std::vector<py::object> before;  // what it was while graphs were captured
};

// The arguments of one call, by name; those without elements may lie anywhere.
class Arguments {
   public:
    // Both throw ArgumentError naming an array that is on another device than those before it.
    void reads(const Array& array, const std::string& name) { add(array, name, false); }
    void writes(const Array& array, const std::string& name) { add(array, name, true); }
    void reads(const std::vector<Array>& arrays, const std::string& name) { add_all(arrays, name, false); }
    void writes(const std::vector<Array>& arrays, const std::string& name) { add_all(arrays, name, true); }

    // An array of which the call has what it needs already, on whatever device: for require_apart() only.
    void was_read(const Array& array, const std::string& name);

    // `arrays`, added in this order, may lie where they do: the kernel's contract allows it, and something else that is
    // added covers their bytes.
    void excuse(const std::vector<const Array*>& arrays);
    // `written` may be exactly `read`.
    void may_be(const Array& written, const Array& read);
    // ArgumentError if an array that is written has bytes in common with any other.
    void require_apart() const;

    int device() const { return device_; }
    const Array* example() const { return example_; }  // one that is on that device; null if all are empty
    const std::vector<const Array*>& all() const { return all_; }

   private:
    struct Extent {
        const char* begin;
        const char* end;
        const Array* array;
        size_t name;    // in names_
        int64_t index;  // of the array under that name, -1: it is the only one
        bool written;
        bool excused = false;
    };
    void add(const Array& array, const std::string& name, bool written);
    void add_extent(const Array& array, int64_t index, bool written);
    std::string name_of(const Extent& extent) const;
    void add_all(const std::vector<Array>& arrays, const std::string& name, bool written);

    std::vector<const Array*> all_;
    std::vector<Extent> extents_;  // of those that have elements
    std::vector<std::string> names_;
    const Array* example_ = nullptr;
    Extent example_extent_{};
    int device_ = Buffer::kHost;
};

// Makes the arguments' device current and orders the call's stream after the streams that produced them: torch's
// current one, or what the CUDA array interface names. finish() lets those wait for the call in turn.
class DeviceCall {
   public:
    explicit DeviceCall(const Arguments& arguments);
    DeviceCall(const DeviceCall&) = delete;
    DeviceCall& operator=(const DeviceCall&) = delete;

    Stream stream() const { return stream_; }
    // At least this many bytes: `scratch`'s, or, where that is null, some that live as long as this object. With or
    // without the interpreter's lock. DeviceError if they cannot be had because the stream is captured.
    cuda::Workspace& workspace(Scratch* scratch, int64_t num_bytes);
    // With PYCOMM_SYNC=1, waits for the kernels and reports what went wrong in them.
    void finish();

   private:
    void grow(Scratch& chosen, int64_t num_bytes);
    void require_growth_in_capture(const Scratch* scratch, int64_t num_bytes) const;

    const Arguments& arguments_;
    device::Guard guard_;  // goes back also when the constructor throws
    Scratch own_;
    Stream stream_ = nullptr;
    std::vector<Stream> others_;
};

}  // namespace pycomm
