// For groups over several hosts only: their connections.
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

// data: one or several rows of descriptors, with one for each rank.
std::unique_ptr<TcpGroup> make_tcp_group(int rank, uint64_t meeting, const std::vector<std::vector<int>>& data,
                                         const std::vector<int>& control, const std::vector<std::string>& addresses,
                                         double dead_after) {
    std::vector<Descriptor> lines = owned_sockets(control);
    std::vector<std::vector<Descriptor>> links(lines.size());
    bool fits = !data.empty();
    for (const std::vector<int>& row : data) {
        std::vector<Descriptor> sockets = owned_sockets(row);
        fits = fits && sockets.size() == links.size();
        for (size_t p = 0; fits && p < links.size(); ++p) links[p].push_back(std::move(sockets[p]));
    }
    const int size = static_cast<int>(links.size());
    if (rank < 0 || rank >= size || !fits || addresses.size() != links.size()) {
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
