// For groups on one host only: memory that their ranks share.
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/group.h"
#include "bindings/reduce_op.h"
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
    return group.reduce_scatter_apart(target.buffer, from, op, timeout, parts);
}

}  // namespace

void bind_shared_memory(py::module_& module) {
    module.def("shared_file_bytes", &shared_file_bytes, py::arg("size"));
    py::class_<Block>(module, "Block", py::buffer_protocol())
        .def("map_over", &Block::map_over, py::arg("address"))
        .def_buffer(&Block::info);
    py::class_<PeerMemory>(module, "PeerMemory", py::buffer_protocol()).def_buffer(&PeerMemory::info);
    py::class_<SharedMemoryGroup, Group>(module, "SharedMemoryGroup")
        .def(py::init(&make_group), py::arg("rank"), py::arg("memory"), py::arg("sockets"), py::arg("file_bytes"),
             py::arg("names") = std::vector<int>())
        .def("own_share", &own_share, py::arg("x"))
        .def("all_reduce_apart", &all_reduce_apart, py::arg("x"), py::arg("op"), py::arg("begin"), py::arg("pieces"),
             py::arg("timeout"))
        .def("reduce_scatter_apart", &reduce_scatter_apart, py::arg("out"), py::arg("xs"), py::arg("op"),
             py::arg("pieces"), py::arg("timeout"))
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
        .def("give_up_stopped_after", &SharedMemoryGroup::give_up_stopped_after, py::arg("seconds"));
}

}  // namespace pycomm
