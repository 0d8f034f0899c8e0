#include "kernels/pack.h"

#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

void pack_arrays(py::handle tensors, py::handle out, py::handle scale, py::handle limit, py::handle finite,
                 py::object unless, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    std::vector<Array> sources = as_arrays(tensors, "tensors", Access::kRead);
    Array target = as_array(out, "out", Access::kWrite);
    Array flag = as_answer(finite, "finite", 1);
    Array condition = unless.is_none() ? Array{} : as_answer(unless, "unless", 1, Access::kRead);
    Factor factor(scale);
    const double most = as_number(limit, "limit");
    std::vector<Buffer> buffers = buffers_of(sources);
    require_total(buffers, "tensors", target.buffer, "out");
    Arguments arguments;
    arguments.writes(target, "out");
    arguments.reads(sources, "tensors");
    arguments.writes(flag, "finite");
    if (!unless.is_none()) arguments.reads(condition, "unless");
    factor.add_to(arguments);
    excuse_in_place(arguments, sources, target);
    arguments.require_apart();
    auto answer = static_cast<bool*>(flag.buffer.data);
    auto skip = static_cast<const bool*>(condition.buffer.data);
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::pack_workspace_bytes(buffers.size()));
            cuda::pack(buffers, target.buffer, factor.on_gpu(), most, answer, skip, workspace, call.stream());
        },
        [&] {
            const double by = factor.on_cpu();
            *answer = (skip != nullptr && *skip) || pack(buffers, target.buffer, {}, by, most, num_threads);
        });
}

void pack_flagged(py::handle tensors, const std::vector<bool>& has_data, py::handle out, py::handle flags,
                  py::object bits, py::handle scale, py::handle limit, std::pair<int64_t, int64_t> skipped,
                  py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    std::vector<Array> sources = as_arrays(tensors, "tensors", Access::kRead);
    Array target = as_array(out, "out", Access::kWrite);
    PackFlags places;
    Array places_of_flags = as_array(flags, "flags", Access::kWrite);
    Array values = bits.is_none() ? Array{} : as_movable(bits, "bits", Access::kRead);
    Factor factor(scale);
    const double most = as_number(limit, "limit");
    std::vector<Buffer> buffers = buffers_of(sources);
    require_total(buffers, "tensors", target.buffer, "out");
    require_count(static_cast<int64_t>(has_data.size()), static_cast<int64_t>(buffers.size()), "has_data", "tensors");
    places.num_bits = static_cast<int>((places_of_flags.buffer.count - places.count(buffers.size())) / 2);
    const int64_t num_flags = places_of_flags.buffer.count;
    require_same(places_of_flags.buffer, "flags", Buffer{nullptr, num_flags, target.buffer.dtype}, "out");
    require_count(num_flags, places.count(buffers.size()), "flags", "tensors");
    if (!bits.is_none()) require_count(values.buffer.num_bytes(), places.num_bits, "bits", "flags");
    const Range skip{skipped.first, skipped.second};
    if (skip.begin < 0 || skip.size() < 0 || skip.end > target.buffer.count) {
        throw ArgumentError(format("skip is (%lld, %lld), wanted a range of out's %lld elements",
                                   static_cast<long long>(skip.begin), static_cast<long long>(skip.end),
                                   static_cast<long long>(target.buffer.count)));
    }
    if (skip.size() > 0 && target.on_device()) throw ArgumentError("skip is for arrays in CPU memory");
    Arguments arguments;
    arguments.writes(target, "out");
    arguments.writes(places_of_flags, "flags");
    arguments.reads(sources, "tensors");
    if (!bits.is_none()) arguments.reads(values, "bits");
    factor.add_to(arguments);
    excuse_in_place(arguments, sources, target);
    arguments.require_apart();
    places.out = places_of_flags.buffer.bytes();
    places.bits = static_cast<const bool*>(values.buffer.data);
    for (size_t j = 0; j < buffers.size(); ++j) {
        if (!has_data[j]) {
            buffers[j].data = nullptr;
        } else if (buffers[j].data == nullptr) {
            buffers[j].data = target.buffer.data;  // an empty one, which has data all the same
        }
    }
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::pack_workspace_bytes(buffers.size()));
            cuda::pack(buffers, target.buffer, places, factor.on_gpu(), most, workspace, call.stream());
        },
        [&] { pack(buffers, target.buffer, places, factor.on_cpu(), most, num_threads, skip); });
}

}  // namespace

void bind_pack(py::module_& module) {
    module.def("pack", &pack_arrays, py::arg("tensors"), py::arg("out"), py::arg("scale"), py::arg("limit"),
               py::arg("finite"), py::arg("unless"), py::arg("scratch"), py::arg("num_threads"));
    module.def("pack_flagged", &pack_flagged, py::arg("tensors"), py::arg("has_data"), py::arg("out"), py::arg("flags"),
               py::arg("bits"), py::arg("scale"), py::arg("limit"), py::arg("skip"), py::arg("scratch"),
               py::arg("num_threads"));
}

}  // namespace pycomm
