#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/collectives.h"
#include "bindings/reduce_op.h"
#include "execute/run.h"
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

std::pair<Array, ReduceOp> look_at_reduction(SharedMemoryGroup& group, py::handle x, const std::string& op_name,
                                             double timeout) {
    return look_at(group, timeout, [&] {
        Array seen = as_array(x, "x", Access::kWrite);
        require_host(seen, "x");
        ReduceOp named = reduce_op_named(op_name);
        require_reducible(seen.buffer, named);
        return std::pair{std::move(seen), named};
    });
}

void all_reduce(SharedMemoryGroup& group, py::handle x, const std::string& op_name, double timeout) {
    auto [array, op] = look_at_reduction(group, x, op_name, timeout);
    py::gil_scoped_release release;
    group.all_reduce(array.buffer, op, timeout);
}

NamedProgram make_program(py::array_t<int64_t, py::array::c_style> words, int rank, int size, std::string name,
                          uint64_t digest) {
    return {parse_program(words.data(), words.size(), rank, size), std::move(name), digest};
}

void run(SharedMemoryGroup& group, const NamedProgram& program, py::handle x, const std::string& op_name,
         double timeout) {
    look_at(group, timeout, [&] {
        const Program& mine = program.program;
        if (mine.rank == group.rank() && mine.size == group.size()) return;
        throw ArgumentError(format("the program is of rank %d of %d, wanted one of rank %d of %d", mine.rank, mine.size,
                                   group.rank(), group.size()));
    });
    auto [array, op] = look_at_reduction(group, x, op_name, timeout);
    py::gil_scoped_release release;
    run_program(group, program, array.buffer, op, timeout);
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

void all_to_all(SharedMemoryGroup& group, py::handle out, py::handle x, double timeout) {
    auto [target, source] = look_at(group, timeout, [&] {
        Array seen = as_movable(out, "out", Access::kWrite);
        Array read = as_movable(x, "x", Access::kRead);
        require_host(seen, "out");
        require_host(read, "x");
        require_ratio(seen.buffer, "out", read.buffer, "x", 1);
        if (read.buffer.count % group.size() != 0) {
            throw ArgumentError(format("x has %lld elements, wanted a multiple of the %d ranks",
                                       static_cast<long long>(read.buffer.count), group.size()));
        }
        return std::pair{std::move(seen), std::move(read)};
    });
    py::gil_scoped_release release;
    group.all_to_all(target.buffer, source.buffer, timeout);
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
    py::class_<NamedProgram>(module, "Program")
        .def(py::init(&make_program), py::arg("words"), py::arg("rank"), py::arg("size"), py::arg("name"),
             py::arg("digest"));
    py::class_<SharedMemoryGroup>(module, "SharedMemoryGroup")
        .def(py::init([](int rank, int size, std::vector<int> memory, std::vector<int> sockets, int64_t file_bytes) {
                 return std::make_unique<SharedMemoryGroup>(rank, size, std::move(memory), std::move(sockets),
                                                            file_bytes, &check_python_signals);
             }),
             py::arg("rank"), py::arg("size"), py::arg("memory"), py::arg("sockets"), py::arg("file_bytes"))
        .def("all_reduce", &all_reduce, py::arg("x"), py::arg("op"), py::arg("timeout"))
        .def("run", &run, py::arg("program"), py::arg("x"), py::arg("op"), py::arg("timeout"))
        .def("reduce_scatter", &reduce_scatter, py::arg("out"), py::arg("x"), py::arg("op"), py::arg("timeout"))
        .def("all_gather", &all_gather, py::arg("out"), py::arg("x"), py::arg("timeout"))
        .def("all_to_all", &all_to_all, py::arg("out"), py::arg("x"), py::arg("timeout"))
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
