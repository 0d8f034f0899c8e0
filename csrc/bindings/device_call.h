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

// Scratch memory that a caller keeps from call to call. It grows as needed, allocated by the arrays' own
// library, but not while the stream is captured into a CUDA graph. Memory that a graph uses is kept: the graph may be
// launched at any time.
struct Scratch {
    cuda::Workspace workspace;
    py::object owner;
    int device = Buffer::kHost;
    bool in_graph = false;           // used by a graph, which writes its own tables to it
    std::vector<py::object> before;  // earlier memory that graphs use
};

// The arguments of one call, by name; those without elements may lie anywhere.
class Arguments {
   public:
    // Both throw ArgumentError naming an array that is on another device than those before it.
    void reads(const Array& array, const std::string& name) { add(array, name, false); }
    void writes(const Array& array, const std::string& name) { add(array, name, true); }
    void reads(const std::vector<Array>& arrays, const std::string& name) { add_all(arrays, name, false); }
    void writes(const std::vector<Array>& arrays, const std::string& name) { add_all(arrays, name, true); }

    // An array that was read already, and may lie on any device: for require_apart() only.
    void was_read(const Array& array, const std::string& name);

    // Exempts `arrays`, given in the order in which they were added, from require_apart(): the kernel's contract allows
    // their places, and another added array covers their bytes.
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
// current one, or those that CUDA array interfaces name. finish() orders these streams after the call.
class DeviceCall {
   public:
    explicit DeviceCall(const Arguments& arguments);
    DeviceCall(const DeviceCall&) = delete;
    DeviceCall& operator=(const DeviceCall&) = delete;

    Stream stream() const { return stream_; }
    // At least `num_bytes`: in `scratch` or, if that is null, in memory that lives as long as this object. Throws
    // DeviceError if it had to allocate while the stream is captured.
    cuda::Workspace& workspace(Scratch* scratch, int64_t num_bytes);
    // With PYCOMM_SYNC=1, waits for the kernels and reports what went wrong in them.
    void finish();

   private:
    void grow(Scratch& chosen, int64_t num_bytes);
    void require_growth_in_capture(const Scratch* scratch, int64_t num_bytes) const;

    const Arguments& arguments_;
    device::Guard guard_;  // restores the device even if the constructor throws
    Scratch own_;
    Stream stream_ = nullptr;
    std::vector<Stream> others_;
};

}  // namespace pycomm
