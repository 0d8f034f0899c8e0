// What only groups of several hosts have: their connections.
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/group.h"
#include "transport/tcp/group.h"

namespace pycomm {
namespace {

// Takes over the descriptors that Python passes, -1 where there is none.
std::vector<Descriptor> owned_sockets(const std::vector<int>& descriptors) {
    std::vector<Descriptor> owners;
    for (int fd : descriptors) owners.emplace_back(fd);
    return owners;
}

std::unique_ptr<TcpGroup> make_tcp_group(int rank, uint64_t meeting, const std::vector<int>& data,
                                         const std::vector<int>& control, const std::vector<std::string>& addresses,
                                         double dead_after) {
    std::vector<Descriptor> links = owned_sockets(data), lines = owned_sockets(control);
    const int size = static_cast<int>(links.size());
    if (rank < 0 || rank >= size || lines.size() != links.size() || addresses.size() != links.size()) {
        throw ArgumentError("data, control and addresses require one entry for each rank");
    }
    py::gil_scoped_release release;
    return std::make_unique<TcpGroup>(rank, meeting, std::move(links), std::move(lines), addresses, dead_after,
                                      &check_python_signals);
}

}  // namespace

void bind_tcp(py::module_& module) {
    const auto unlocked = py::call_guard<py::gil_scoped_release>();
    py::class_<TcpGroup, Group>(module, "TcpGroup")
        .def(py::init(&make_tcp_group), py::arg("rank"), py::arg("meeting"), py::arg("data"), py::arg("control"),
             py::arg("addresses"), py::arg("dead_after"))
        .def("bytes_sent", &TcpGroup::bytes_sent, unlocked)
        .def("hand_over", &TcpGroup::hand_over, py::arg("patience"), unlocked);
}

}  // namespace pycomm
