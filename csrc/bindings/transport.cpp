// Helpers of the transports that are written in Python: arrays as memory, and the state of the system.
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/collectives.h"
#include "transport/cores.h"
#include "transport/memory.h"
#include "transport/process.h"
#include "transport/shared_memory/shares.h"
#include "transport/shared_memory/staging.h"

namespace pycomm {
namespace {

// An array in host memory as an object with the buffer protocol, for transports that are written in Python.
class HostArray {
   public:
    HostArray(py::handle object, const std::string& name, bool writes, bool moves) {
        Access access = writes ? Access::kWrite : Access::kRead;
        array_ = moves ? as_movable(object, name, access) : as_array(object, name, access);
        require_host(array_, name);
    }

    const char* dtype() const { return name_of(array_.buffer.dtype); }
    int tag() const { return array_.buffer.tag; }
    int64_t elements() const { return array_.buffer.count / array_.unit; }
    int64_t count() const { return array_.buffer.count; }
    bool overlaps(const HostArray& other, int rank, int size) const {
        try {
            require_apart(array_.buffer, other.array_.buffer, rank, size);
            return false;
        } catch (const ArgumentError&) {
            return true;
        }
    }
    py::buffer_info info() const {
        return {reinterpret_cast<unsigned char*>(array_.buffer.data), array_.buffer.num_bytes()};
    }

   private:
    Array array_;
};

const char* name_of(ProcessState state) {
    switch (state) {
        case ProcessState::kAlive:
            return "alive";
        case ProcessState::kStopped:
            return "stopped";
        case ProcessState::kDumpingCore:
            return "dumping core";
        case ProcessState::kDead:
            return "dead";
        default:
            return "unknown";
    }
}

}  // namespace

void bind_transport(py::module_& module) {
    module.def("process_state", [](int pid) { return name_of(state_of(pid)); }, py::arg("pid"));
    module.def(
        "have_a_core_each",
        [](const std::vector<pid_t>& peers, const std::string& root) { return have_a_core_each(peers, root); },
        py::arg("peers"), py::arg("root") = "");
    module.def("leave_this_core", &leave_this_core);
    module.def(
        "shares_of",
        [](const std::vector<double>& slacks, int64_t num_bytes, int64_t count) {
            const Shares shares(slacks, num_bytes);
            std::vector<std::pair<int64_t, int64_t>> out;
            for (int p = 0; p < static_cast<int>(slacks.size()); ++p) {
                const Range share = shares.of(count, p);
                out.emplace_back(share.begin, share.end);
            }
            return out;
        },
        py::arg("slacks"), py::arg("num_bytes"), py::arg("count"));
    py::class_<StagingChoice>(module, "StagingChoice")
        .def(py::init<>())
        .def("next", &StagingChoice::next)
        .def("observe", &StagingChoice::observe, py::arg("num_bytes"), py::arg("seconds"));
    module.def(
        "available_memory", [](const std::string& root) { return available_memory(root); }, py::arg("root") = "");
    py::class_<HostArray>(module, "HostArray", py::buffer_protocol())
        .def(py::init<py::handle, const std::string&, bool, bool>(), py::arg("object"), py::arg("name"),
             py::arg("writes"), py::arg("moves"))
        .def_property_readonly("dtype", &HostArray::dtype)
        .def_property_readonly("tag", &HostArray::tag)
        .def_property_readonly("count", &HostArray::count)
        .def_property_readonly("elements", &HostArray::elements)
        .def("overlaps", &HostArray::overlaps, py::arg("other"), py::arg("rank"), py::arg("size"))
        .def_buffer(&HostArray::info);
}

}  // namespace pycomm
