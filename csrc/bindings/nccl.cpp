// Compiled only where device memory exists: with CUDA, or with the tests' emulator of it.
#include <pybind11/stl.h>

#include <cstring>
#include <memory>

#include "base/error.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/collectives.h"
#include "bindings/reduce_op.h"
#include "device/runtime.h"
#include "transport/nccl/group.h"

namespace pycomm {
namespace nccl_calls {  // shared_memory.cpp has functions of these names; both may be compiled as one
namespace {

using Paths = std::vector<std::string>;

Stream stream_at(uintptr_t handle) { return reinterpret_cast<Stream>(handle); }

void require_device(const NcclGroup& group, const Buffer& buffer, const char* name) {
    // An empty array need not lie on any device.
    if (buffer.device == group.device() || buffer.count == 0) return;
    throw ArgumentError(format("%s is on %s, wanted %s, the device of this communicator", name,
                               device_name(buffer.device).c_str(), device_name(group.device()).c_str()));
}

void require_timeout(double timeout) {
    if (timeout > 0) return;  // and not NaN
    throw ArgumentError(format("timeout is %g, wanted a positive number of seconds", timeout));
}

// Operations continue after the call, so even inputs cannot be contiguous copies that live only as long as the call.
// All arrays must be contiguous, like those that are written to.
Array reducible(const NcclGroup& group, py::handle object, const char* name) {
    Array array = as_array(object, name, Access::kWrite);
    require_device(group, array.buffer, name);
    return array;
}

Array movable(const NcclGroup& group, py::handle object, const char* name) {
    Array array = as_movable(object, name, Access::kWrite);
    require_device(group, array.buffer, name);
    return array;
}

py::tuple describe(const nccl::Library& library) { return py::make_tuple(library.version(), library.path); }

py::tuple nccl_library(const Paths& paths) {
    const nccl::Library* library = nullptr;
    {
        py::gil_scoped_release release;
        library = &nccl::library(paths);
    }
    return describe(*library);
}

py::object nccl_version(const Paths& paths) {
    try {
        return nccl_library(paths);
    } catch (const DeviceError&) {
        return py::none();
    }
}

std::string nccl_why_not_registered(const Paths& paths, bool symmetric) {
    py::gil_scoped_release release;
    return nccl::library(paths).why_not_registered(symmetric);
}

uintptr_t nccl_allocate(int64_t num_bytes, int device, const Paths& paths) {
    py::gil_scoped_release release;
    device::Guard guard(device);
    device::RelaxedCapture relaxed;
    return reinterpret_cast<uintptr_t>(nccl::allocate(nccl::library(paths), num_bytes));
}

// After all work with the memory.
void nccl_free(uintptr_t address, int device, const Paths& paths) {
    py::gil_scoped_release release;
    device::Guard guard(device);
    nccl::library(paths).mem_free(reinterpret_cast<void*>(address));
}

py::bytes nccl_unique_id(const Paths& paths) {
    nccl::UniqueId id;
    {
        py::gil_scoped_release release;
        id = nccl::make_unique_id(nccl::library(paths));
    }
    return {id.bytes, sizeof id.bytes};
}

std::unique_ptr<NcclGroup> make_group(int rank, int size, int device, const py::bytes& unique_id, bool ring,
                                      double timeout, const Paths& paths) {
    if (size < 1) throw ArgumentError(format("size is %d, wanted at least 1", size));
    require_rank(rank, "rank", size);
    require_timeout(timeout);
    std::string id = unique_id;
    if (id.size() != nccl::kUniqueIdBytes) {
        throw ArgumentError(
            format("unique_id has %zu bytes, wanted %zu from nccl_unique_id()", id.size(), nccl::kUniqueIdBytes));
    }
    nccl::Creation wanted{rank, size, device, {}, ring, timeout, &check_python_signals};
    std::memcpy(wanted.id.bytes, id.data(), id.size());
    py::gil_scoped_release release;
    return std::make_unique<NcclGroup>(nccl::library(paths), wanted);
}

void all_reduce(NcclGroup& group, py::handle x, py::handle op_name, uintptr_t stream, double timeout) {
    Array array = reducible(group, x, "x");
    ReduceOp op = reduce_op_named(op_name);
    require_reducible(array.buffer, op);
    require_timeout(timeout);
    py::gil_scoped_release release;
    group.all_reduce(array.buffer, op, stream_at(stream), timeout);
}

void reduce_scatter(NcclGroup& group, py::handle out, py::handle x, py::handle op_name, uintptr_t stream,
                    double timeout) {
    Array target = reducible(group, out, "out");
    Array source = reducible(group, x, "x");
    ReduceOp op = reduce_op_named(op_name);
    require_reducible(source.buffer, op);
    require_ratio(source.buffer, "x", target.buffer, "out", group.size());
    require_apart(target.buffer, source.buffer, group.rank(), group.size());
    require_timeout(timeout);
    py::gil_scoped_release release;
    group.reduce_scatter(target.buffer, source.buffer, op, stream_at(stream), timeout);
}

void all_gather(NcclGroup& group, py::handle out, py::handle x, uintptr_t stream, double timeout) {
    Array target = movable(group, out, "out");
    Array source = movable(group, x, "x");
    require_ratio(target.buffer, "out", source.buffer, "x", group.size());
    require_apart(target.buffer, source.buffer, group.rank(), group.size());
    require_timeout(timeout);
    py::gil_scoped_release release;
    group.all_gather(target.buffer, source.buffer, stream_at(stream), timeout);
}

void reduce(NcclGroup& group, py::handle x, py::handle dst, py::handle op_name, uintptr_t stream, double timeout) {
    Array array = reducible(group, x, "x");
    const int64_t root = as_integer(dst, "dst");
    require_rank(root, "dst", group.size());
    ReduceOp op = reduce_op_named(op_name);
    require_reducible(array.buffer, op);
    require_timeout(timeout);
    py::gil_scoped_release release;
    group.reduce(array.buffer, static_cast<int>(root), op, stream_at(stream), timeout);
}

// broadcast, send and recv: an array, and one rank.
using ToOrFrom = void (NcclGroup::*)(const Buffer&, int, Stream, double);

template <ToOrFrom operation>
void move(NcclGroup& group, py::handle x, py::handle peer, const char* peer_name, uintptr_t stream, double timeout) {
    Array array = movable(group, x, "x");
    const int64_t rank = as_integer(peer, peer_name);
    require_rank(rank, peer_name, group.size());
    require_timeout(timeout);
    py::gil_scoped_release release;
    (group.*operation)(array.buffer, static_cast<int>(rank), stream_at(stream), timeout);
}

void broadcast(NcclGroup& group, py::handle x, py::handle src, uintptr_t stream, double timeout) {
    move<&NcclGroup::broadcast>(group, x, src, "src", stream, timeout);
}

void send(NcclGroup& group, py::handle x, py::handle dst, uintptr_t stream, double timeout) {
    move<&NcclGroup::send>(group, x, dst, "dst", stream, timeout);
}

void recv(NcclGroup& group, py::handle x, py::handle src, uintptr_t stream, double timeout) {
    move<&NcclGroup::recv>(group, x, src, "src", stream, timeout);
}

void register_memory(NcclGroup& group, uintptr_t address, int64_t num_bytes, bool symmetric, double timeout) {
    require_timeout(timeout);
    py::gil_scoped_release release;
    group.register_memory(reinterpret_cast<void*>(address), num_bytes, symmetric, timeout);
}

void deregister_memory(NcclGroup& group, uintptr_t address) {
    py::gil_scoped_release release;
    group.deregister_memory(reinterpret_cast<void*>(address));
}

void group_end(NcclGroup& group, double timeout) {
    require_timeout(timeout);
    py::gil_scoped_release release;
    group.group_end(timeout);
}

}  // namespace
}  // namespace nccl_calls

void bind_nccl(py::module_& module) {
    using py::arg;
    using WithoutGil = py::call_guard<py::gil_scoped_release>;
    module.def("cuda_driver_version", &device::driver_version);
    module.def("nccl_library", &nccl_calls::nccl_library, arg("paths"));
    module.def("nccl_version", &nccl_calls::nccl_version, arg("paths"));
    module.def("nccl_why_not_registered", &nccl_calls::nccl_why_not_registered, arg("paths"), arg("symmetric"));
    module.def("nccl_allocate", &nccl_calls::nccl_allocate, arg("num_bytes"), arg("device"), arg("paths"));
    module.def("nccl_free", &nccl_calls::nccl_free, arg("address"), arg("device"), arg("paths"));
    module.def("nccl_unique_id", &nccl_calls::nccl_unique_id, arg("paths"));
    py::class_<NcclGroup>(module, "NcclGroup")
        .def(py::init(&nccl_calls::make_group), arg("rank"), arg("size"), arg("device"), arg("unique_id"), arg("ring"),
             arg("timeout"), arg("paths"))
        .def("all_reduce", &nccl_calls::all_reduce, arg("x"), arg("op"), arg("stream"), arg("timeout"))
        .def("reduce_scatter", &nccl_calls::reduce_scatter, arg("out"), arg("x"), arg("op"), arg("stream"),
             arg("timeout"))
        .def("all_gather", &nccl_calls::all_gather, arg("out"), arg("x"), arg("stream"), arg("timeout"))
        .def("broadcast", &nccl_calls::broadcast, arg("x"), arg("src"), arg("stream"), arg("timeout"))
        .def("reduce", &nccl_calls::reduce, arg("x"), arg("dst"), arg("op"), arg("stream"), arg("timeout"))
        .def("send", &nccl_calls::send, arg("x"), arg("dst"), arg("stream"), arg("timeout"))
        .def("recv", &nccl_calls::recv, arg("x"), arg("src"), arg("stream"), arg("timeout"))
        .def("register_memory", &nccl_calls::register_memory, arg("address"), arg("num_bytes"), arg("symmetric"),
             arg("timeout"))
        .def("deregister_memory", &nccl_calls::deregister_memory, arg("address"))
        .def("group_start", &NcclGroup::group_start, WithoutGil())
        .def("group_end", &nccl_calls::group_end, arg("timeout"))
        .def("group_abandon", &NcclGroup::group_abandon, WithoutGil())
        .def("check", &NcclGroup::check, WithoutGil())
        .def("close", &NcclGroup::close, arg("why"), WithoutGil());
}

}  // namespace pycomm
