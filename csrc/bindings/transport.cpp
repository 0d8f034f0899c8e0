#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "transport/shared_memory.h"

namespace pycomm {
namespace {

// Memory of an arena as an object with the buffer protocol: who holds a view of it keeps it.
class Block {
   public:
    Block(std::shared_ptr<Arena> arena, int64_t num_bytes)
        : arena_(std::move(arena)), data_(arena_->allocate(num_bytes)), num_bytes_(num_bytes) {}
    ~Block() { arena_->release(data_); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    py::buffer_info info() const { return {reinterpret_cast<unsigned char*>(data_), num_bytes_}; }

   private:
    std::shared_ptr<Arena> arena_;
    char* data_;
    int64_t num_bytes_;
};

void check_python_signals() {
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

ReduceOp op_numbered(int op) { return static_cast<ReduceOp>(op); }

void require_reducible(const Buffer& x, ReduceOp op) {
    if (op != ReduceOp::kMean || is_floating(x.dtype)) return;
    throw ArgumentTypeError(format("op 'mean' wants a floating dtype, x has %s", name_of(x.dtype)));
}

void require_ratio(const Buffer& whole, const char* whole_name, const Buffer& part, const char* part_name, int size) {
    if (whole.dtype != part.dtype) {
        throw ArgumentTypeError(format("%s has dtype %s, wanted %s as %s", whole_name, name_of(whole.dtype),
                                       name_of(part.dtype), part_name));
    }
    if (whole.count != part.count * size) {
        throw ArgumentError(format("%s has %lld elements, wanted %lld: %d ranks times the %lld of %s", whole_name,
                                   static_cast<long long>(whole.count), static_cast<long long>(part.count * size), size,
                                   static_cast<long long>(part.count), part_name));
    }
}

void all_reduce(SharedMemoryGroup& group, py::handle x, int op, double timeout) {
    Array array = as_array(x, "x", Access::kWrite);
    require_reducible(array.buffer, op_numbered(op));
    py::gil_scoped_release release;
    group.all_reduce(array.buffer, op_numbered(op), timeout);
}

void reduce_scatter(SharedMemoryGroup& group, py::handle out, py::handle x, int op, double timeout) {
    Array target = as_array(out, "out", Access::kWrite);
    Array source = as_array(x, "x", Access::kRead);
    require_reducible(source.buffer, op_numbered(op));
    require_ratio(source.buffer, "x", target.buffer, "out", group.size());
    py::gil_scoped_release release;
    group.reduce_scatter(target.buffer, source.buffer, op_numbered(op), timeout);
}

void all_gather(SharedMemoryGroup& group, py::handle out, py::handle x, double timeout) {
    Array target = as_movable(out, "out", Access::kWrite);
    Array source = as_movable(x, "x", Access::kRead);
    require_ratio(target.buffer, "out", source.buffer, "x", group.size());
    py::gil_scoped_release release;
    group.all_gather(target.buffer, source.buffer, timeout);
}

void broadcast(SharedMemoryGroup& group, py::handle x, int src, double timeout) {
    Array array = as_movable(x, "x", Access::kWrite);
    if (src < 0 || src >= group.size()) {
        throw ArgumentError(format("src is %d, wanted 0 <= src < %d", src, group.size()));
    }
    py::gil_scoped_release release;
    group.broadcast(array.buffer, src, timeout);
}

}  // namespace

void bind_transport(py::module_& module) {
    module.def("shared_file_bytes", &shared_file_bytes, py::arg("size"));
    py::class_<Block>(module, "Block", py::buffer_protocol()).def_buffer(&Block::info);
    py::class_<SharedMemoryGroup>(module, "SharedMemoryGroup")
        .def(py::init([](int rank, int size, std::vector<int> memory, std::vector<int> sockets, int64_t file_bytes) {
                 return std::make_unique<SharedMemoryGroup>(rank, size, std::move(memory), std::move(sockets), file_bytes,
                                                            &check_python_signals);
             }),
             py::arg("rank"), py::arg("size"), py::arg("memory"), py::arg("sockets"), py::arg("file_bytes"))
        .def("all_reduce", &all_reduce, py::arg("x"), py::arg("op"), py::arg("timeout"))
        .def("reduce_scatter", &reduce_scatter, py::arg("out"), py::arg("x"), py::arg("op"), py::arg("timeout"))
        .def("all_gather", &all_gather, py::arg("out"), py::arg("x"), py::arg("timeout"))
        .def("broadcast", &broadcast, py::arg("x"), py::arg("src"), py::arg("timeout"))
        .def("barrier", &SharedMemoryGroup::barrier, py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
        .def("refuse", &SharedMemoryGroup::refuse, py::arg("reason"), py::arg("timeout"),
             py::call_guard<py::gil_scoped_release>())
        .def("allocate",
             [](SharedMemoryGroup& group, int64_t num_bytes) {
                 py::gil_scoped_release release;
                 return std::make_unique<Block>(group.arena(), num_bytes);
             },
             py::arg("num_bytes"))
        .def("close", &SharedMemoryGroup::close, py::arg("why"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace pycomm
