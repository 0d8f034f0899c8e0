#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/collectives.h"
#include "bindings/reduce_op.h"
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

// Looks at the arguments; when they are wrong, the other ranks of the group are told before the error leaves.
template <class Look>
auto look_at(SharedMemoryGroup& group, double timeout, Look&& look) {
    try {
        return look();
    } catch (const std::exception& error) {
        std::string reason = error.what();  // may need the interpreter
        py::gil_scoped_release release;
        group.refuse(reason, timeout);
        throw;
    }
}

void all_reduce(SharedMemoryGroup& group, py::handle x, const std::string& op_name, double timeout) {
    auto [array, op] = look_at(group, timeout, [&] {
        Array seen = as_array(x, "x", Access::kWrite);
        require_host(seen, "x");
        ReduceOp named = reduce_op_named(op_name);
        require_reducible(seen.buffer, named);
        return std::pair{std::move(seen), named};
    });
    py::gil_scoped_release release;
    group.all_reduce(array.buffer, op, timeout);
}

void reduce_scatter(SharedMemoryGroup& group, py::handle out, py::handle x, const std::string& op_name,
                    double timeout) {
    auto [target, source, op] = look_at(group, timeout, [&] {
        Array seen = as_array(out, "out", Access::kWrite);
        Array read = as_array(x, "x", Access::kRead);
        require_host(seen, "out");
        require_host(read, "x");
        ReduceOp named = reduce_op_named(op_name);
        require_reducible(read.buffer, named);
        require_ratio(read.buffer, "x", seen.buffer, "out", group.size());
        return std::tuple{std::move(seen), std::move(read), named};
    });
    py::gil_scoped_release release;
    group.reduce_scatter(target.buffer, source.buffer, op, timeout);
}

void all_gather(SharedMemoryGroup& group, py::handle out, py::handle x, double timeout) {
    auto [target, source] = look_at(group, timeout, [&] {
        Array seen = as_movable(out, "out", Access::kWrite);
        Array read = as_movable(x, "x", Access::kRead);
        require_host(seen, "out");
        require_host(read, "x");
        require_ratio(seen.buffer, "out", read.buffer, "x", group.size());
        return std::pair{std::move(seen), std::move(read)};
    });
    py::gil_scoped_release release;
    group.all_gather(target.buffer, source.buffer, timeout);
}

void broadcast(SharedMemoryGroup& group, py::handle x, int src, double timeout) {
    Array array = look_at(group, timeout, [&] {
        Array seen = as_movable(x, "x", Access::kWrite);
        require_host(seen, "x");
        require_rank(src, "src", group.size());
        return seen;
    });
    py::gil_scoped_release release;
    group.broadcast(array.buffer, src, timeout);
}

}  // namespace

void bind_transport(py::module_& module) {
    module.def("shared_file_bytes", &shared_file_bytes, py::arg("size"));
    py::class_<Block>(module, "Block", py::buffer_protocol()).def_buffer(&Block::info);
    py::class_<SharedMemoryGroup>(module, "SharedMemoryGroup")
        .def(py::init([](int rank, int size, std::vector<int> memory, std::vector<int> sockets, int64_t file_bytes) {
                 return std::make_unique<SharedMemoryGroup>(rank, size, std::move(memory), std::move(sockets),
                                                            file_bytes, &check_python_signals);
             }),
             py::arg("rank"), py::arg("size"), py::arg("memory"), py::arg("sockets"), py::arg("file_bytes"))
        .def("all_reduce", &all_reduce, py::arg("x"), py::arg("op"), py::arg("timeout"))
        .def("reduce_scatter", &reduce_scatter, py::arg("out"), py::arg("x"), py::arg("op"), py::arg("timeout"))
        .def("all_gather", &all_gather, py::arg("out"), py::arg("x"), py::arg("timeout"))
        .def("broadcast", &broadcast, py::arg("x"), py::arg("src"), py::arg("timeout"))
        .def("barrier", &SharedMemoryGroup::barrier, py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
        .def("refuse", &SharedMemoryGroup::refuse, py::arg("reason"), py::arg("timeout"),
             py::call_guard<py::gil_scoped_release>())
        .def(
            "allocate",
            [](SharedMemoryGroup& group, int64_t num_bytes) {
                py::gil_scoped_release release;
                return std::make_unique<Block>(group.arena(), num_bytes);
            },
            py::arg("num_bytes"))
        .def("close", &SharedMemoryGroup::close, py::arg("why"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace pycomm
