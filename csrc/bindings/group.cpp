// Collectives of CPU memory, on any transport.
#include "bindings/group.h"

#include <pybind11/stl.h>

#include <optional>

#include "base/error.h"
#include "bindings/reduce_op.h"
#include "bindings/scalars.h"

namespace pycomm {

thread_local HeldUntilWait* HeldUntilWait::current = nullptr;

std::pair<Array, ReduceOp> look_at_reduction(Group& group, py::handle x, py::handle op_name, double timeout) {
    return look_at(group, timeout, [&] {
        Array seen = as_array(x, "x", Access::kWrite);
        require_host(seen, "x");
        ReduceOp named = reduce_op_named(op_name);
        require_reducible(seen.buffer, named);
        return std::pair{std::move(seen), named};
    });
}

namespace {

void all_reduce(Group& group, py::handle x, py::handle op_name, double timeout) {
    auto [array, op] = look_at_reduction(group, x, op_name, timeout);
    py::gil_scoped_release release;
    group.all_reduce(array.buffer, op, timeout);
}

void reduce_to_one(Group& group, py::handle x, py::handle dst, py::handle op_name, double timeout) {
    auto [array, op] = look_at_reduction(group, x, op_name, timeout);
    const int root = look_at(group, timeout, [&] {
        int64_t rank = as_integer(dst, "dst");
        require_rank(rank, "dst", group.size());
        return static_cast<int>(rank);
    });
    py::gil_scoped_release release;
    group.reduce(array.buffer, root, op, timeout);
}

NamedProgram make_program(py::handle words, int rank, int size, std::string name, uint64_t digest) {
    const Array seen = as_array(words, "words", Access::kRead);
    if (seen.buffer.dtype != DType::kI64) throw ArgumentTypeError("words are not int64");
    return {parse_program(static_cast<const int64_t*>(seen.buffer.data), seen.buffer.count, rank, size),
            std::move(name), digest};
}

void run(Group& group, const NamedProgram& program, py::handle x, py::handle op_name, double timeout) {
    look_at(group, timeout, [&] {
        const Program& mine = program.program;
        if (mine.rank == group.rank() && mine.size == group.size()) return;
        throw ArgumentError(format("the program is for rank %d of %d, wanted one for rank %d of %d", mine.rank,
                                   mine.size, group.rank(), group.size()));
    });
    auto [array, op] = look_at_reduction(group, x, op_name, timeout);
    py::gil_scoped_release release;
    group.run(program, array.buffer, op, timeout);
}

void reduce_scatter(Group& group, py::handle out, py::handle x, py::handle op_name, double timeout) {
    auto [target, source, op] = look_at(group, timeout, [&] {
        Array seen = as_array(out, "out", Access::kWrite);
        Array read = as_array(x, "x", Access::kRead);
        require_host(seen, "out");
        require_host(read, "x");
        ReduceOp named = reduce_op_named(op_name);
        require_reducible(read.buffer, named);
        require_ratio(read.buffer, "x", seen.buffer, "out", group.size());
        require_apart(seen.buffer, read.buffer, group.rank(), group.size());
        return std::tuple{std::move(seen), std::move(read), named};
    });
    py::gil_scoped_release release;
    group.reduce_scatter(target.buffer, source.buffer, op, timeout);
}

// Two arrays whose elements are only moved; `check` sees both.
template <class Check>
std::pair<Array, Array> look_at_movement(Group& group, py::handle out, py::handle x, double timeout, Check&& check) {
    return look_at(group, timeout, [&] {
        Array seen = as_movable(out, "out", Access::kWrite);
        Array read = as_movable(x, "x", Access::kRead);
        require_host(seen, "out");
        require_host(read, "x");
        check(seen, read);
        require_apart(seen.buffer, read.buffer, group.rank(), group.size());
        return std::pair{std::move(seen), std::move(read)};
    });
}

void all_gather(Group& group, py::handle out, py::handle x, double timeout) {
    auto [target, source] = look_at_movement(group, out, x, timeout, [&](const Array& seen, const Array& read) {
        require_ratio(seen.buffer, "out", read.buffer, "x", group.size());
    });
    py::gil_scoped_release release;
    group.all_gather(target.buffer, source.buffer, timeout);
}

void all_to_all(Group& group, py::handle out, py::handle x, double timeout) {
    auto [target, source] = look_at_movement(group, out, x, timeout, [&](const Array& seen, const Array& read) {
        require_ratio(seen.buffer, "out", read.buffer, "x", 1);
        const int64_t elements = read.buffer.count / read.unit;
        if (elements % group.size() == 0) return;
        throw ArgumentError(format("x has %lld elements, wanted a multiple of the %d ranks",
                                   static_cast<long long>(elements), group.size()));
    });
    py::gil_scoped_release release;
    group.all_to_all(target.buffer, source.buffer, timeout);
}

void all_to_all_v(Group& group, py::handle outs, py::handle xs, double timeout) {
    auto [targets, sources] = look_at(group, timeout, [&] {
        std::vector<Array> seen = as_parts(outs, "outs", Access::kWrite, group.size());
        std::vector<Array> read = as_parts(xs, "xs", Access::kRead, group.size());
        require_apart(buffers_of(seen), buffers_of(read), group.rank());
        return std::pair{std::move(seen), std::move(read)};
    });
    const std::vector<Buffer> to = buffers_of(targets), from = buffers_of(sources);
    py::gil_scoped_release release;
    group.all_to_all_v(to, from, timeout);
}

void all_gather_v(Group& group, py::handle outs, py::handle x, double timeout) {
    py::list xs;
    for (int p = 0; p < group.size(); ++p) xs.append(x);
    auto [targets, sources] = look_at(group, timeout, [&] {
        std::vector<Array> seen = as_parts(outs, "outs", Access::kWrite, group.size());
        std::vector<Array> read = as_parts(xs, "xs", Access::kRead, group.size());
        require_apart(buffers_of(seen), buffers_of(read), group.rank());
        return std::pair{std::move(seen), std::move(read)};
    });
    const std::vector<Buffer> to = buffers_of(targets);
    py::gil_scoped_release release;
    group.all_gather_v(to, sources[0].buffer, timeout);
}

void reduce_scatter_v(Group& group, py::handle out, py::handle xs, py::handle op_name, double timeout) {
    auto [target, sources, op] = look_at(group, timeout, [&] {
        Array seen = as_array(out, "out", Access::kWrite);
        require_host(seen, "out");
        std::vector<Array> read = as_parts(xs, "xs", Access::kRead, group.size());
        ReduceOp named = reduce_op_named(op_name);
        require_reducible(seen.buffer, named, "out");
        require_contributions(seen.buffer, buffers_of(read), group.rank());
        return std::tuple{std::move(seen), std::move(read), named};
    });
    const std::vector<Buffer> from = buffers_of(sources);
    py::gil_scoped_release release;
    group.reduce_scatter_v(target.buffer, from, op, timeout);
}

void broadcast(Group& group, py::handle x, py::handle src, double timeout) {
    auto [array, root] = look_at(group, timeout, [&] {
        Array seen = as_movable(x, "x", Access::kWrite);
        require_host(seen, "x");
        int64_t rank = as_integer(src, "src");
        require_rank(rank, "src", group.size());
        return std::pair{std::move(seen), static_cast<int>(rank)};
    });
    py::gil_scoped_release release;
    group.broadcast(array.buffer, root, timeout);
}

}  // namespace

Group* group_of_all_reduce(py::handle call) {
    const py::object group = py::getattr(call, "__self__", py::none());
    const bool is_it = py::isinstance<Group>(group) && call.equal(group.attr("all_reduce"));
    return is_it ? group.cast<Group*>() : nullptr;
}

void all_reduce_small(Group& group, const Buffer& x, ReduceOp op, double timeout) {
    const HeldUntilWait held;
    group.all_reduce(x, op, timeout);
}

void bind_group(py::module_& module) {
    before_long_wait = &HeldUntilWait::let_go;
    const auto unlocked = py::call_guard<py::gil_scoped_release>();
    py::class_<NamedProgram>(module, "Program")
        .def(py::init(&make_program), py::arg("words"), py::arg("rank"), py::arg("size"), py::arg("name"),
             py::arg("digest"));
    py::class_<Group>(module, "Group")
        .def("all_reduce", &all_reduce, py::arg("x"), py::arg("op"), py::arg("timeout"))
        .def("run", &run, py::arg("program"), py::arg("x"), py::arg("op"), py::arg("timeout"))
        .def("reduce_scatter", &reduce_scatter, py::arg("out"), py::arg("x"), py::arg("op"), py::arg("timeout"))
        .def("all_gather", &all_gather, py::arg("out"), py::arg("x"), py::arg("timeout"))
        .def("all_to_all", &all_to_all, py::arg("out"), py::arg("x"), py::arg("timeout"))
        .def("reduce", &reduce_to_one, py::arg("x"), py::arg("dst"), py::arg("op"), py::arg("timeout"))
        .def("all_to_all_v", &all_to_all_v, py::arg("outs"), py::arg("xs"), py::arg("timeout"))
        .def("all_gather_v", &all_gather_v, py::arg("outs"), py::arg("x"), py::arg("timeout"))
        .def("reduce_scatter_v", &reduce_scatter_v, py::arg("out"), py::arg("xs"), py::arg("op"), py::arg("timeout"))
        .def("broadcast", &broadcast, py::arg("x"), py::arg("src"), py::arg("timeout"))
        .def("barrier", &Group::barrier, py::arg("timeout"), unlocked)
        .def("refuse", &Group::refuse, py::arg("reason"), py::arg("timeout"), unlocked)
        .def("close", &Group::close, py::arg("why"), unlocked);
}

}  // namespace pycomm
