// Messages of SharedMemoryGroup.
#include "transport/shared_memory/messages.h"

#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/collectives.h"
#include "bindings/scalars.h"

namespace pycomm {
namespace {

int64_t tag_of(py::handle tag) {
    const int64_t number = as_integer(tag, "tag");
    if (number >= 0 && number < kTagEnd) return number;
    throw ArgumentError(
        format("tag is %lld, wanted 0 <= tag < %lld", static_cast<long long>(number), static_cast<long long>(kTagEnd)));
}

int rank_of(const SharedMemoryGroup& group, py::handle rank, const char* name) {
    const int64_t number = as_integer(rank, name);
    require_rank(number, name, group.size());
    if (number == group.rank()) {
        throw ArgumentError(
            format("%s is %lld, this rank itself; wanted another one", name, static_cast<long long>(number)));
    }
    return static_cast<int>(number);
}

int64_t width_of(const Array& array) { return array.unit * size_of(array.buffer.dtype); }

void send(SharedMemoryGroup& group, py::handle x, py::handle dst, py::handle tag, double timeout) {
    Array array = as_movable(x, "x", Access::kRead);
    require_host(array, "x");
    const int to = rank_of(group, dst, "dst");
    const int64_t with = tag_of(tag);
    const int64_t width = width_of(array);
    py::gil_scoped_release release;
    group.messages().send(array.buffer, width, to, with, timeout);
}

// A posted receive for Python.
class PyReceipt {
   public:
    PyReceipt(SharedMemoryGroup& group, ReceiptPtr receipt) : group_(group), receipt_(std::move(receipt)) {}

    int wait(double timeout) { return group_.messages().wait(receipt_, timeout); }
    bool is_completed() { return group_.messages().is_completed(receipt_); }
    bool cancel() { return group_.messages().cancel(receipt_); }

   private:
    SharedMemoryGroup& group_;  // kept alive by pybind11
    ReceiptPtr receipt_;
};

std::unique_ptr<PyReceipt> post_receive(SharedMemoryGroup& group, py::handle x, py::handle src, py::handle tag) {
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
    ReceiptPtr receipt = group.messages().post_receive(buffer, width, from, with, std::move(keeper));
    return std::make_unique<PyReceipt>(group, std::move(receipt));
}

}  // namespace

void bind_messages(py::module_& module) {
    const auto unlocked = py::call_guard<py::gil_scoped_release>();
    py::class_<PyReceipt>(module, "Receipt")
        .def("wait", &PyReceipt::wait, py::arg("timeout"), unlocked)
        .def("is_completed", &PyReceipt::is_completed, unlocked)
        .def("cancel", &PyReceipt::cancel, unlocked);
    static_cast<py::class_<SharedMemoryGroup>>(module.attr("SharedMemoryGroup"))
        .def("send", &send, py::arg("x"), py::arg("dst"), py::arg("tag"), py::arg("timeout"))
        .def("post_receive", &post_receive, py::arg("x"), py::arg("src"), py::arg("tag"), py::keep_alive<0, 1>())
        .def_property(
            "buffer_limit", [](SharedMemoryGroup& group) { return group.messages().buffer_limit(); },
            [](SharedMemoryGroup& group, int64_t num_bytes) { group.messages().set_buffer_limit(num_bytes); })
        .def_property_readonly("buffered_bytes",
                               [](SharedMemoryGroup& group) { return group.messages().buffered_bytes(); });
}

}  // namespace pycomm
