#include "bindings/device_call.h"

#include <algorithm>

#include "base/error.h"

namespace pycomm {

void Arguments::add(const Array& array, const std::string& name) {
    all_.push_back(&array);
    if (array.buffer.count == 0) return;
    if (example_ == nullptr) {
        example_ = &array;
        example_name_ = name;
        device_ = array.buffer.device;
    } else if (array.buffer.device != device_) {
        throw ArgumentError(name + " is on " + device_name(array.buffer.device) + ", " + example_name_ + " on " +
                            device_name(device_) + "; wanted all arrays on one device");
    }
}

void Arguments::add(const std::vector<Array>& arrays, const std::string& name) {
    for (size_t i = 0; i < arrays.size(); ++i) add(arrays[i], name + "[" + std::to_string(i) + "]");
}

#if defined(PYCOMM_CUDA_VERSION)

namespace {

Stream torch_stream(int device) {
    py::object stream = py::module_::import("torch").attr("cuda").attr("current_stream")(device);
    return reinterpret_cast<Stream>(stream.attr("cuda_stream").cast<uintptr_t>());
}

// `waiting` starts what it is given from now on after all that `first` has been given.
void order(Stream first, Stream waiting) {
    Event event = device::make_event();
    device::record(event, first);
    device::wait_for(waiting, event);
    device::destroy_event(event);
}

}  // namespace

DeviceCall::DeviceCall(const Arguments& arguments) : arguments_(arguments), guard_(arguments.device()) {
    std::vector<Stream> producers;
    for (const Array* array : arguments.all()) {
        if (array->is_torch && array->on_device()) {
            producers.insert(producers.begin(), torch_stream(arguments.device()));
            break;
        }
    }
    for (const Array* array : arguments.all()) {
        if (array->stream) producers.push_back(*array->stream);
    }
    if (!producers.empty()) stream_ = producers[0];
    for (Stream producer : producers) {
        if (producer == stream_ || std::count(others_.begin(), others_.end(), producer) != 0) continue;
        others_.push_back(producer);
        order(producer, stream_);
    }
    cuda::raise_faults();
}

cuda::Workspace& DeviceCall::workspace(Scratch* scratch, int64_t num_bytes) {
    Scratch& chosen = scratch == nullptr ? own_ : *scratch;
    if (chosen.device != arguments_.device() || chosen.workspace.num_bytes < num_bytes) {
        constexpr int64_t kAlignment = 256;
        py::object allocate = py::module_::import("pycomm.kernels.arrays").attr("device_bytes");
        chosen.owner = allocate(arguments_.example()->owner, num_bytes + kAlignment);
        Array memory = as_movable(chosen.owner, "scratch memory", Access::kWrite);
        auto address = reinterpret_cast<uintptr_t>(memory.buffer.data);
        chosen.workspace = {memory.buffer.bytes() + (kAlignment - address % kAlignment) % kAlignment, num_bytes, {}};
        chosen.device = arguments_.device();
    }
    return chosen.workspace;
}

void DeviceCall::finish() {
    for (Stream other : others_) order(stream_, other);
    if (!device::sync_wanted()) return;
    {
        py::gil_scoped_release release;
        device::synchronize(stream_);
    }
    cuda::raise_faults();
}

#endif

}  // namespace pycomm
