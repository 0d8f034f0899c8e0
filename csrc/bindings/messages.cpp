// Messages of groups.
#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/collectives.h"
#include "bindings/scalars.h"
#include "transport/group.h"

namespace pycomm {
namespace {

int64_t tag_of(py::handle tag) {
    const int64_t number = as_integer(tag, "tag");
    if (number >= 0 && number < kTagEnd) return number;
    throw ArgumentError(
        format("tag is %lld, wanted 0 <= tag < %lld", static_cast<long long>(number), static_cast<long long>(kTagEnd)));
}

int rank_of(const Group& group, py::handle rank, const char* name) {
    const int64_t number = as_integer(rank, name);
    require_rank(number, name, group.size());
    if (number == group.rank()) {
        throw ArgumentError(
            format("%s is %lld, this rank itself; wanted another one", name, static_cast<long long>(number)));
    }
    return static_cast<int>(number);
}

int64_t width_of(const Array& array) { return array.unit * size_of(array.buffer.dtype); }

void send(Group& group, py::handle x, py::handle dst, py::handle tag, double timeout) {
    Array array = as_movable(x, "x", Access::kRead);
    require_host(array, "x");
    const int to = rank_of(group, dst, "dst");
    const int64_t with = tag_of(tag);
    const int64_t width = width_of(array);
    py::gil_scoped_release release;
    group.send(array.buffer, width, to, with, timeout);
}

std::unique_ptr<PostedReceive> post_receive(Group& group, py::handle x, py::handle src, py::handle tag) {
    Array array = as_movable(x, "x", Access::kWrite);
    require_host(array, "x");
    const int from = src.is_none() ? -1 : rank_of(group, src, "src");
    const int64_t with = tag_of(tag);
    const int64_t width = width_of(array);
    const Buffer buffer = array.buffer;
    // Dropped by whichever thread finishes the receive, which does not hold the interpreter's lock.
    std::shared_ptr<void> keeper(new Array(std::move(array)), [](void* kept) {
        py::gil_scoped_acquire gil;
        delete static_cast<Array*>(kept);
    });
    py::gil_scoped_release release;
    return group.post_receive(buffer, width, from, with, std::move(keeper));
}

}  // namespace

void bind_messages(py::module_& module) {
    const auto unlocked = py::call_guard<py::gil_scoped_release>();
    py::class_<PostedReceive>(module, "Receipt")
        .def("wait", &PostedReceive::wait, py::arg("timeout"), unlocked)
        .def("is_completed", &PostedReceive::is_completed, unlocked)
        .def("cancel", &PostedReceive::cancel, unlocked);
    static_cast<py::class_<Group>>(module.attr("Group"))
        .def("send", &send, py::arg("x"), py::arg("dst"), py::arg("tag"), py::arg("timeout"))
        .def("post_receive", &post_receive, py::arg("x"), py::arg("src"), py::arg("tag"), py::keep_alive<0, 1>())
        .def_property("buffer_limit", &Group::buffer_limit, &Group::set_buffer_limit)
        .def_property_readonly("buffered_bytes", &Group::buffered_bytes);
}

}  // namespace pycomm
