#include "bindings/device_call.h"

#include <algorithm>

#include "base/error.h"
#include "bindings/scalars.h"

namespace pycomm {

Scratch* scratch_of(py::handle object) {
    if (object.is_none()) return nullptr;
    if (!py::isinstance<Scratch>(object)) {
        throw ArgumentTypeError("scratch is " + shown(object) + ", wanted a Scratch or None");
    }
    return object.cast<Scratch*>();
}

std::string Arguments::name_of(const Extent& extent) const {
    const std::string& name = names_[extent.name];
    return extent.index < 0 ? name : name + "[" + std::to_string(extent.index) + "]";
}

void Arguments::add_extent(const Array& array, int64_t index, bool written) {
    all_.push_back(&array);
    if (array.buffer.count == 0) return;
    const char* begin = array.buffer.bytes();
    extents_.push_back({begin, begin + array.buffer.num_bytes(), &array, names_.size() - 1, index, written});
    if (example_ == nullptr) {
        example_ = &array;
        example_extent_ = extents_.back();
        device_ = array.buffer.device;
    } else if (array.buffer.device != device_) {
        throw ArgumentError(name_of(extents_.back()) + " is on " + device_name(array.buffer.device) + ", " +
                            name_of(example_extent_) + " on " + device_name(device_) +
                            "; wanted all arrays on one device");
    }
}

void Arguments::add(const Array& array, const std::string& name, bool written) {
    names_.push_back(name);
    add_extent(array, -1, written);
}

void Arguments::add_all(const std::vector<Array>& arrays, const std::string& name, bool written) {
    names_.push_back(name);
    for (size_t i = 0; i < arrays.size(); ++i) add_extent(arrays[i], static_cast<int64_t>(i), written);
}

void Arguments::was_read(const Array& array, const std::string& name) {
    if (array.buffer.count == 0) return;
    names_.push_back(name);
    const char* begin = array.buffer.bytes();
    extents_.push_back({begin, begin + array.buffer.num_bytes(), &array, names_.size() - 1, -1, false});
}

void Arguments::excuse(const std::vector<const Array*>& arrays) {
    auto next = arrays.begin();
    for (Extent& extent : extents_) {
        if (next == arrays.end()) return;
        if (extent.array != *next) continue;
        extent.excused = true;
        ++next;
    }
}

void Arguments::may_be(const Array& written, const Array& read) {
    bool same = written.buffer.data == read.buffer.data && written.buffer.num_bytes() == read.buffer.num_bytes();
    if (same && read.buffer.count > 0) excuse({&read});
}

void Arguments::require_apart() const {
    std::vector<const Extent*> in_order;
    in_order.reserve(extents_.size());
    for (const Extent& extent : extents_) {
        if (!extent.excused) in_order.push_back(&extent);
    }
    auto before = [](const Extent* a, const Extent* b) { return a->begin < b->begin; };
    if (!std::is_sorted(in_order.begin(), in_order.end(), before)) std::sort(in_order.begin(), in_order.end(), before);
    // Of the extents that begin earlier, the one that ends last: if it does not reach an array, none of them does.
    const Extent *written = nullptr, *read = nullptr;
    for (const Extent* extent : in_order) {
        const Extent* other = written != nullptr && written->end > extent->begin ? written : nullptr;
        if (extent->written && other == nullptr && read != nullptr && read->end > extent->begin) other = read;
        if (other != nullptr) {
            const Extent* target = extent->written ? extent : other;
            const Extent* source = extent->written ? other : extent;
            throw ArgumentError(name_of(*target) + " overlaps " + name_of(*source) +
                                ", wanted an array of its own to write to");
        }
        const Extent*& last = extent->written ? written : read;
        if (last == nullptr || last->end < extent->end) last = extent;
    }
}

#if defined(PYCOMM_CUDA_VERSION)

namespace {

Stream torch_stream(int device) {
    py::object stream = py::module_::import("pycomm.torch_internals").attr("raw_stream")(device);
    return reinterpret_cast<Stream>(stream.cast<uintptr_t>());
}

// Orders all later work on `waiting` after all earlier work on `first`.
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
    if (!device::are_kernels_loaded(arguments.device())) {
        py::gil_scoped_release release;  // compiling them may take seconds
        device::load_kernels(arguments.device());
    }
    cuda::raise_faults();
}

cuda::Workspace& DeviceCall::workspace(Scratch* scratch, int64_t num_bytes) {
    Scratch& chosen = scratch == nullptr ? own_ : *scratch;
    bool captured = device::is_capturing(stream_);
    if (chosen.device != arguments_.device() || chosen.workspace.num_bytes < num_bytes) {
        if (captured) require_growth_in_capture(scratch, num_bytes);
        grow(chosen, num_bytes);
    }
    chosen.in_graph |= captured;
    if (chosen.in_graph) chosen.workspace.table.clear();  // the graph's launches overwrite it
    return chosen.workspace;
}

void DeviceCall::grow(Scratch& chosen, int64_t num_bytes) {
    constexpr int64_t kAlignment = 256;
    py::object allocate = py::module_::import("pycomm.kernels.arrays").attr("device_bytes");
    py::object owner = allocate(arguments_.example()->owner, num_bytes + kAlignment);
    Array memory = as_movable(owner, "scratch memory", Access::kWrite);
    if (chosen.in_graph) chosen.before.push_back(chosen.owner);
    chosen.owner = owner;
    auto address = reinterpret_cast<uintptr_t>(memory.buffer.data);
    chosen.workspace = {memory.buffer.bytes() + (kAlignment - address % kAlignment) % kAlignment, num_bytes, {}};
    chosen.device = arguments_.device();
    chosen.in_graph = false;
}

void DeviceCall::require_growth_in_capture(const Scratch* scratch, int64_t num_bytes) const {
    if (scratch != nullptr) {
        throw device::warm_up_wanted(
            "scratch memory", format("%lld bytes are needed, %lld are allocated", static_cast<long long>(num_bytes),
                                     static_cast<long long>(scratch->workspace.num_bytes)));
    }
    if (arguments_.example()->is_torch) return;  // from the graph's own pool, which lives as long as the graph
    throw device::warm_up_wanted("scratch memory",
                                 "this call's own would be freed before the graph is launched: pass scratch=");
}

void DeviceCall::finish() {
    for (Stream other : others_) order(stream_, other);
    if (!device::sync_wanted() || device::is_capturing(stream_)) return;
    {
        py::gil_scoped_release release;
        device::synchronize(stream_);
    }
    cuda::raise_faults();
}

#endif

}  // namespace pycomm
