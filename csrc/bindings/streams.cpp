// Streams and events for the Python side of communication. Other libraries' streams are integers: cudaStream_t.
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "device/runtime.h"

namespace pycomm {
namespace {

namespace py = pybind11;

Stream stream_of(uintptr_t handle) { return reinterpret_cast<Stream>(handle); }

// A moment on a stream.
class Moment {
   public:
    Moment(int device, Stream stream) : device_(device) {
        device::Guard guard(device_);
        is_captured_ = device::is_capturing(stream);
        event_ = device::make_event();
        device::record(event_, stream);
    }
    ~Moment() {
        try {
            device::Guard guard(device_);
            device::destroy_event(event_);
        } catch (const DeviceError&) {  // the GPU is lost, and its events with it
        }
    }
    Moment(const Moment&) = delete;
    Moment& operator=(const Moment&) = delete;

    void hold_back(uintptr_t stream) const {
        device::Guard guard(device_);
        device::wait_for(stream_of(stream), event_);
    }
    bool has_passed() const {
        device::Guard guard(device_);  // else the query would make a context on the current device
        device::RelaxedCapture relaxed;
        return device::has_happened(event_);
    }
    bool is_captured() const { return is_captured_; }  // into a CUDA graph: it never passes

   private:
    int device_;
    Event event_;
    bool is_captured_;
};

// Streams are reused and never destroyed: torch's allocator keeps the handles of streams on which tensors were
// recorded, and uses them when it frees their memory, at any later time.
class Streams {
   public:
    static Streams& instance() {
        static auto* streams = new Streams;  // never destroyed: communicators may outlive static objects
        return *streams;
    }
    Stream take(int device) {
        std::lock_guard lock(mutex_);
        std::vector<Stream>& free = free_[device];
        if (free.empty()) return device::make_stream(device);
        Stream stream = free.back();
        free.pop_back();
        return stream;
    }
    void give_back(int device, Stream stream) {
        std::lock_guard lock(mutex_);
        free_[device].push_back(stream);
    }

   private:
    std::mutex mutex_;
    std::map<int, std::vector<Stream>> free_;
};

class CommStream {
   public:
    explicit CommStream(int device) : device_(device), stream_(Streams::instance().take(device)) {}
    ~CommStream() { Streams::instance().give_back(device_, stream_); }
    CommStream(const CommStream&) = delete;
    CommStream& operator=(const CommStream&) = delete;

    uintptr_t handle() const { return reinterpret_cast<uintptr_t>(stream_); }
    void follow(uintptr_t stream) const {
        if (stream != handle()) Moment(device_, stream_of(stream)).hold_back(handle());
    }
    std::unique_ptr<Moment> now() const { return std::make_unique<Moment>(device_, stream_); }

   private:
    int device_;
    Stream stream_;
};

void require_no_capture(int device, const std::vector<uintptr_t>& streams, const std::string& what,
                        const std::string& why) {
    device::Guard guard(device);
    for (uintptr_t stream : streams) {
        if (device::is_capturing(stream_of(stream))) throw device::warm_up_wanted(what, why);
    }
}

}  // namespace

void bind_streams(py::module_& module) {
    module.def("require_no_capture", &require_no_capture, py::arg("device"), py::arg("streams"), py::arg("what"),
               py::arg("why"));
    py::class_<Moment>(module, "Moment")
        .def("hold_back", &Moment::hold_back, py::arg("stream"))
        .def("has_passed", &Moment::has_passed)
        .def_property_readonly("is_captured", &Moment::is_captured);
    py::class_<CommStream>(module, "CommStream")
        .def(py::init<int>(), py::arg("device"))
        .def_property_readonly("handle", &CommStream::handle)
        .def("follow", &CommStream::follow, py::arg("stream"))
        .def("now", &CommStream::now);
}

}  // namespace pycomm
