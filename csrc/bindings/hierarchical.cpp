// For groups over several hosts, some with several ranks, only: their two groups, and sums over a host.
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/group.h"
#include "transport/hierarchical/group.h"

namespace pycomm {
namespace {

std::unique_ptr<HierarchicalGroup> make_hierarchical_group(TcpGroup& flat, SharedMemoryGroup& local,
                                                           std::vector<std::vector<int>> hosts) {
    return std::make_unique<HierarchicalGroup>(flat, local, std::move(hosts), &check_python_signals);
}

void reduce_on_host(HierarchicalGroup& group, py::handle parts, double timeout) {
    const std::vector<Array> seen = look_at(group, timeout, [&] { return as_arrays(parts, "parts", Access::kWrite); });
    const std::vector<Buffer> arrays = buffers_of(seen);
    py::gil_scoped_release release;
    group.reduce_on_host(arrays, timeout);
}

void skip_comparisons(HierarchicalGroup& group, bool all, bool after_the_next) {
    using Skip = HierarchicalGroup::Skip;
    group.skip_comparisons(all ? Skip::kAll : after_the_next ? Skip::kAfterTheNext : Skip::kNothing);
}

}  // namespace

void bind_hierarchical(py::module_& module) {
    py::class_<HierarchicalGroup, Group>(module, "HierarchicalGroup")
        .def(py::init(&make_hierarchical_group), py::arg("flat"), py::arg("local"), py::arg("hosts"),
             py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
        .def("reduce_on_host", &reduce_on_host, py::arg("parts"), py::arg("timeout"))
        .def("skip_comparisons", &skip_comparisons, py::arg("all"), py::arg("after_the_next"))
        .def("give_up_stopped_after", &HierarchicalGroup::give_up_stopped_after, py::arg("seconds"));
}

}  // namespace pycomm
