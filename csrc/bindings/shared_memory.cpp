#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/collectives.h"
#include "bindings/reduce_op.h"
#include "bindings/scalars.h"
#include "execute/run.h"
#include "transport/shared_memory/group.h"

namespace pycomm {
namespace {

// Memory of an arena as an object with the buffer protocol. A view keeps it alive.
class Block {
   public:
    Block(std::shared_ptr<Arena> arena, int64_t num_bytes)
        : arena_(std::move(arena)), data_(arena_->allocate(num_bytes)), num_bytes_(num_bytes) {}
    ~Block() { arena_->release(data_); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    py::buffer_info info() const { return {reinterpret_cast<unsigned char*>(data_), num_bytes_}; }
    void map_over(uintptr_t address) const { arena_->map_over(data_, reinterpret_cast<char*>(address)); }

   private:
    std::shared_ptr<Arena> arena_;
    char* data_;
    int64_t num_bytes_;
};

// Memory in a rank's file as an object with the buffer protocol. The rank that allocated it must keep it.
class PeerMemory {
   public:
    PeerMemory(std::shared_ptr<Mapping> file, int64_t offset, int64_t num_bytes)
        : file_(std::move(file)), offset_(offset), num_bytes_(num_bytes) {
        const int64_t most = file_->num_bytes();
        if (offset >= 0 && num_bytes >= 0 && num_bytes <= most && offset <= most - num_bytes) return;
        throw ArgumentError(format("%lld bytes at offset %lld do not lie in a rank's file",
                                   static_cast<long long>(num_bytes), static_cast<long long>(offset)));
    }

    py::buffer_info info() const { return {reinterpret_cast<unsigned char*>(file_->data() + offset_), num_bytes_}; }

   private:
    std::shared_ptr<Mapping> file_;
    int64_t offset_, num_bytes_;
};

// Takes over the descriptors that Python passes, -1 where there is none.
std::vector<Descriptor> owned(const std::vector<int>& descriptors) {
    std::vector<Descriptor> owners;
    for (int fd : descriptors) owners.emplace_back(fd);
    return owners;
}

std::unique_ptr<SharedMemoryGroup> make_group(int rank, const std::vector<int>& memory, const std::vector<int>& sockets,
                                              int64_t file_bytes, std::vector<int> names) {
    std::vector<Descriptor> files = owned(memory), connections = owned(sockets);
    const int size = static_cast<int>(files.size());
    if (rank < 0 || rank >= size || connections.size() != files.size()) {
        throw ArgumentError("memory and sockets require one descriptor for each rank");
    }
    if (!names.empty() && names.size() != files.size()) throw ArgumentError("names requires one number for each rank");
    std::shared_ptr<Arena> arena;
    std::vector<std::shared_ptr<Mapping>> peers;
    for (int p = 0; p < size; ++p) {
        Descriptor file = std::move(files[static_cast<size_t>(p)]);  // closed once it is mapped
        peers.push_back(p == rank ? nullptr : std::make_shared<Mapping>(file, file_bytes));
        if (p == rank) arena = make_arena(std::move(file), size, file_bytes);
    }
    return std::make_unique<SharedMemoryGroup>(rank, std::move(arena), std::move(peers), std::move(connections),
                                               &check_python_signals, std::move(names));
}

// Checks the arguments. If they are wrong, announces that to the other ranks of the group, then throws the error.
template <class Look>
auto look_at(SharedMemoryGroup& group, double timeout, Look&& look) {
    try {
        return look();
    } catch (const std::exception& error) {
        std::string reason = error.what();  // with the interpreter's lock, which it may need
        py::gil_scoped_release release;
        group.refuse(reason, timeout);
        throw;
    }
}

std::pair<Array, ReduceOp> look_at_reduction(SharedMemoryGroup& group, py::handle x, py::handle op_name,
                                             double timeout) {
    return look_at(group, timeout, [&] {
        Array seen = as_array(x, "x", Access::kWrite);
        require_host(seen, "x");
        ReduceOp named = reduce_op_named(op_name);
        require_reducible(seen.buffer, named);
        return std::pair{std::move(seen), named};
    });
}

void all_reduce(SharedMemoryGroup& group, py::handle x, py::handle op_name, double timeout) {
    auto [array, op] = look_at_reduction(group, x, op_name, timeout);
    py::gil_scoped_release release;
    group.all_reduce(array.buffer, op, timeout);
}

// Holds the interpreter's lock until this thread waits: letting go of it takes longer than most small operations wait.
class HeldUntilWait {
   public:
    HeldUntilWait() : outer_(current) { current = this; }
    ~HeldUntilWait() { current = outer_; }
    HeldUntilWait(const HeldUntilWait&) = delete;
    HeldUntilWait& operator=(const HeldUntilWait&) = delete;

    static void let_go() {
        if (current != nullptr && !current->released_) current->released_.emplace();
    }

   private:
    static thread_local HeldUntilWait* current;
    HeldUntilWait* outer_;  // of the operation whose wait runs the signal handler that calls this one
    std::optional<py::gil_scoped_release> released_;
};
thread_local HeldUntilWait* HeldUntilWait::current = nullptr;

std::pair<int64_t, int64_t> own_share(SharedMemoryGroup& group, py::handle x) {
    const Array seen = as_array(x, "x", Access::kWrite);
    require_host(seen, "x");
    py::gil_scoped_release release;
    const Range share = group.own_share(seen.buffer);
    return {share.begin, share.end};
}

float all_reduce_apart(SharedMemoryGroup& group, py::handle x, py::handle op_name, int64_t begin, py::handle pieces,
                       double timeout) {
    auto [array, op] = look_at_reduction(group, x, op_name, timeout);
    const Buffer& whole = array.buffer;
    const std::vector<Array> read = look_at(group, timeout, [&] {
        std::vector<Array> seen;
        if (PySequence_Check(pieces.ptr()) == 0 || py::len(pieces) > 0) {
            seen = as_arrays(pieces, "pieces", Access::kRead);
        }
        require_pieces(whole, begin, buffers_of(seen));
        return seen;
    });
    const OwnPart own{begin, buffers_of(read)};
    py::gil_scoped_release release;
    return group.all_reduce_apart(whole, own, op, timeout);
}

void reduce_to_one(SharedMemoryGroup& group, py::handle x, py::handle dst, py::handle op_name, double timeout) {
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

void run(SharedMemoryGroup& group, const NamedProgram& program, py::handle x, py::handle op_name, double timeout) {
    look_at(group, timeout, [&] {
        const Program& mine = program.program;
        if (mine.rank == group.rank() && mine.size == group.size()) return;
        throw ArgumentError(format("the program is for rank %d of %d, wanted one for rank %d of %d", mine.rank,
                                   mine.size, group.rank(), group.size()));
    });
    auto [array, op] = look_at_reduction(group, x, op_name, timeout);
    py::gil_scoped_release release;
    run_program(group, program, array.buffer, op, timeout);
}

void reduce_scatter(SharedMemoryGroup& group, py::handle out, py::handle x, py::handle op_name, double timeout) {
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
std::pair<Array, Array> look_at_movement(SharedMemoryGroup& group, py::handle out, py::handle x, double timeout,
                                         Check&& check) {
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

void all_gather(SharedMemoryGroup& group, py::handle out, py::handle x, double timeout) {
    auto [target, source] = look_at_movement(group, out, x, timeout, [&](const Array& seen, const Array& read) {
        require_ratio(seen.buffer, "out", read.buffer, "x", group.size());
    });
    py::gil_scoped_release release;
    group.all_gather(target.buffer, source.buffer, timeout);
}

void all_to_all(SharedMemoryGroup& group, py::handle out, py::handle x, double timeout) {
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

void all_to_all_v(SharedMemoryGroup& group, py::handle outs, py::handle xs, double timeout) {
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

// pieces: None if all of this rank's input is in xs.
float reduce_scatter_apart(SharedMemoryGroup& group, py::handle out, py::handle xs, py::handle op_name,
                           py::handle pieces, double timeout) {
    auto [target, sources, own, op] = look_at(group, timeout, [&] {
        Array seen = as_array(out, "out", Access::kWrite);
        require_host(seen, "out");
        std::vector<Array> read = as_parts(xs, "xs", Access::kRead, group.size()), apart;
        ReduceOp named = reduce_op_named(op_name);
        require_reducible(seen.buffer, named, "out");
        require_contributions(seen.buffer, buffers_of(read), group.rank());
        if (!pieces.is_none()) {
            apart = as_arrays(pieces, "pieces", Access::kRead);
            require_pieces(seen.buffer, 0, buffers_of(apart));
            if (OwnPart{0, buffers_of(apart)}.count() != seen.buffer.count) {
                throw ArgumentError("pieces do not fill out");
            }
        }
        return std::tuple{std::move(seen), std::move(read), std::move(apart), named};
    });
    const std::vector<Buffer> from = buffers_of(sources), parts = buffers_of(own);
    py::gil_scoped_release release;
    return group.reduce_scatter_v(target.buffer, from, op, timeout, parts);
}

void reduce_scatter_v(SharedMemoryGroup& group, py::handle out, py::handle xs, py::handle op_name, double timeout) {
    reduce_scatter_apart(group, out, xs, op_name, py::none(), timeout);
}

void broadcast(SharedMemoryGroup& group, py::handle x, py::handle src, double timeout) {
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

SharedMemoryGroup* group_of_all_reduce(py::handle call) {
    const py::object group = py::getattr(call, "__self__", py::none());
    const bool is_it = py::isinstance<SharedMemoryGroup>(group) && call.equal(group.attr("all_reduce"));
    return is_it ? group.cast<SharedMemoryGroup*>() : nullptr;
}

void all_reduce_small(SharedMemoryGroup& group, const Buffer& x, ReduceOp op, double timeout) {
    const HeldUntilWait held;
    group.all_reduce(x, op, timeout);
}

void bind_shared_memory(py::module_& module) {
    before_long_wait = &HeldUntilWait::let_go;
    module.def("shared_file_bytes", &shared_file_bytes, py::arg("size"));
    py::class_<Block>(module, "Block", py::buffer_protocol())
        .def("map_over", &Block::map_over, py::arg("address"))
        .def_buffer(&Block::info);
    py::class_<PeerMemory>(module, "PeerMemory", py::buffer_protocol()).def_buffer(&PeerMemory::info);
    py::class_<NamedProgram>(module, "Program")
        .def(py::init(&make_program), py::arg("words"), py::arg("rank"), py::arg("size"), py::arg("name"),
             py::arg("digest"));
    py::class_<SharedMemoryGroup>(module, "SharedMemoryGroup")
        .def(py::init(&make_group), py::arg("rank"), py::arg("memory"), py::arg("sockets"), py::arg("file_bytes"),
             py::arg("names") = std::vector<int>())
        .def("all_reduce", &all_reduce, py::arg("x"), py::arg("op"), py::arg("timeout"))
        .def("own_share", &own_share, py::arg("x"))
        .def("all_reduce_apart", &all_reduce_apart, py::arg("x"), py::arg("op"), py::arg("begin"), py::arg("pieces"),
             py::arg("timeout"))
        .def("run", &run, py::arg("program"), py::arg("x"), py::arg("op"), py::arg("timeout"))
        .def("reduce_scatter", &reduce_scatter, py::arg("out"), py::arg("x"), py::arg("op"), py::arg("timeout"))
        .def("all_gather", &all_gather, py::arg("out"), py::arg("x"), py::arg("timeout"))
        .def("all_to_all", &all_to_all, py::arg("out"), py::arg("x"), py::arg("timeout"))
        .def("reduce", &reduce_to_one, py::arg("x"), py::arg("dst"), py::arg("op"), py::arg("timeout"))
        .def("all_to_all_v", &all_to_all_v, py::arg("outs"), py::arg("xs"), py::arg("timeout"))
        .def("reduce_scatter_v", &reduce_scatter_v, py::arg("out"), py::arg("xs"), py::arg("op"), py::arg("timeout"))
        .def("reduce_scatter_apart", &reduce_scatter_apart, py::arg("out"), py::arg("xs"), py::arg("op"),
             py::arg("pieces"), py::arg("timeout"))
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
        .def(
            "offset_of",
            [](const SharedMemoryGroup& group, uintptr_t address, int64_t num_bytes) {
                return group.offset_of({reinterpret_cast<void*>(address), num_bytes, DType::kU8});
            },
            py::arg("address"), py::arg("num_bytes"))
        .def(
            "memory_of",
            [](const SharedMemoryGroup& group, int rank, int64_t offset, int64_t num_bytes) {
                require_rank(rank, "rank", group.size());
                return std::make_unique<PeerMemory>(group.mapping(rank), offset, num_bytes);
            },
            py::arg("rank"), py::arg("offset"), py::arg("num_bytes"))
        .def("give_up_stopped_after", &SharedMemoryGroup::give_up_stopped_after, py::arg("seconds"))
        .def("close", &SharedMemoryGroup::close, py::arg("why"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace pycomm
