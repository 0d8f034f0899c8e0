// What only groups of several hosts have: their connections, and operations of some of the ranks.
#include <pybind11/stl.h>

#include <algorithm>
#include <map>

#include "base/error.h"
#include "bindings/group.h"
#include "bindings/reduce_op.h"
#include "bindings/scalars.h"
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

Kind kind_named(const std::string& name) {
    static const std::map<std::string, Kind> kinds = {
        {"all_reduce", Kind::kAllReduce},         {"reduce_scatter", Kind::kReduceScatter},
        {"all_gather", Kind::kAllGather},         {"broadcast", Kind::kBroadcast},
        {"all_gather_v", Kind::kAllToAllV},       {"reduce_scatter_v", Kind::kReduceScatterV},
        {"reduce_on_host", Kind::kReduceScatterV}};
    const auto found = kinds.find(name);
    if (found == kinds.end()) throw ArgumentError("kind is '" + name + "', wanted the name of a collective");
    return found->second;
}

void require_members(const TcpGroup& group, const std::vector<int>& members) {
    const bool rises = std::is_sorted(members.begin(), members.end(), std::less_equal<>()) || members.size() < 2;
    const bool has_own = std::find(members.begin(), members.end(), group.rank()) != members.end();
    if (rises && has_own && members.front() >= 0 && members.back() < group.size()) return;
    throw ArgumentError("members are no ranks in rising order with this one among them");
}

Operation operation_for(const std::string& kind, const Buffer& x, py::handle op_name, int root) {
    return {.kind = kind_named(kind),
            .dtype = x.dtype,
            .op = reduce_op_named(op_name),
            .tag = x.tag,
            .root = root,
            .count = x.count};
}

void compare(TcpGroup& group, const std::string& kind, py::handle x, py::handle op_name, int root, double timeout) {
    const Array seen = as_movable(x, "x", Access::kRead);
    const Operation operation = operation_for(kind, seen.buffer, op_name, root);
    py::gil_scoped_release release;
    group.compare(operation, timeout);
}

// x: of the dtype that the ranks have in common; empty.
void compare_parts(TcpGroup& group, const std::string& kind, py::handle x, py::handle op_name,
                   const std::vector<int64_t>& sends, const std::vector<int64_t>& receives, double timeout) {
    const Array seen = as_movable(x, "x", Access::kRead);
    const Operation operation = operation_for(kind, seen.buffer, op_name, 0);
    py::gil_scoped_release release;
    group.compare_parts(kind.c_str(), operation, sends, receives, timeout);
}

void all_reduce_among(TcpGroup& group, const std::vector<int>& members, py::handle x, py::handle op_name,
                      double timeout) {
    require_members(group, members);
    const Array seen = as_array(x, "x", Access::kWrite);
    require_host(seen, "x");
    const ReduceOp op = reduce_op_named(op_name);
    require_reducible(seen.buffer, op);
    py::gil_scoped_release release;
    group.all_reduce_among(members, seen.buffer, op, timeout);
}

void broadcast_among(TcpGroup& group, const std::vector<int>& members, py::handle x, int root, double timeout) {
    require_members(group, members);
    const Array seen = as_movable(x, "x", Access::kWrite);
    require_host(seen, "x");
    py::gil_scoped_release release;
    group.broadcast_among(members, seen.buffer, root, timeout);
}

}  // namespace

void bind_tcp(py::module_& module) {
    const auto unlocked = py::call_guard<py::gil_scoped_release>();
    py::class_<TcpGroup, Group>(module, "TcpGroup")
        .def(py::init(&make_tcp_group), py::arg("rank"), py::arg("meeting"), py::arg("data"), py::arg("control"),
             py::arg("addresses"), py::arg("dead_after"))
        .def("compare", &compare, py::arg("kind"), py::arg("x"), py::arg("op"), py::arg("root"), py::arg("timeout"))
        .def("compare_parts", &compare_parts, py::arg("kind"), py::arg("x"), py::arg("op"), py::arg("sends"),
             py::arg("receives"), py::arg("timeout"))
        .def("all_reduce_among", &all_reduce_among, py::arg("members"), py::arg("x"), py::arg("op"), py::arg("timeout"))
        .def("broadcast_among", &broadcast_among, py::arg("members"), py::arg("x"), py::arg("root"), py::arg("timeout"))
        .def("give_up", &TcpGroup::give_up, py::arg("cause"), py::arg("why"), unlocked)
        .def("bytes_sent", &TcpGroup::bytes_sent, unlocked)
        .def("hand_over", &TcpGroup::hand_over, py::arg("patience"), unlocked);
}

}  // namespace pycomm
