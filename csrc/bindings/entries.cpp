#include "kernels/entries.h"

#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

int64_t at_least(py::handle object, const char* name, int64_t least) {
    const int64_t value = as_integer(object, name);
    if (value >= least && value <= INT32_MAX) return value;
    throw ArgumentError(format("%s is %lld, wanted %lld <= %s <= 2147483647", name, static_cast<long long>(value),
                               static_cast<long long>(least), name));
}

EntryLayout make_layout(py::handle num_params, py::handle num_bits, py::handle count, py::handle limit,
                        const std::string& dtype, py::handle half) {
    const DType sums = dtype_named(dtype);
    if (sums != DType::kF32 && sums != DType::kF64) {
        throw ArgumentTypeError("dtype is " + dtype + ", wanted float32 or float64");
    }
    const bool as_half = as_flag(half, "half");
    if (as_half && sums != DType::kF32) throw ArgumentTypeError("half values of float64 sums, wanted float32");
    const int64_t entries = at_least(count, "count", 1), range = at_least(limit, "limit", 1);
    return {at_least(num_params, "num_params", 0), at_least(num_bits, "num_bits", 0), entries, range, sums, as_half};
}

// The arrays of one call, held for its length, with their names for errors.
class Given {
   public:
    explicit Given(const EntryLayout& layout) : layout_(layout) { arrays_.reserve(16); }

    char* bytes(py::handle object, const char* name, Access access, int64_t wanted) {
        Array& array = arrays_.emplace_back(as_movable(object, name, access));
        const int64_t found = array.buffer.num_bytes();
        if (found != wanted) {
            throw ArgumentError(format("%s has %lld bytes, wanted %lld", name, static_cast<long long>(found),
                                       static_cast<long long>(wanted)));
        }
        if (reinterpret_cast<uintptr_t>(array.buffer.data) % kEntryAlignment != 0) {
            throw ArgumentError(std::string(name) + " is not aligned to 8 bytes");
        }
        return add(array, name, access);
    }

    template <class T>
    T* exactly(py::handle object, const char* name, Access access, DType dtype, int64_t count, const char* of_what) {
        Array& array = arrays_.emplace_back(as_exactly(object, name, access, dtype, count, of_what));
        return reinterpret_cast<T*>(add(array, name, access));
    }

    char* sums(py::handle object, const char* name, Access access) {
        return exactly<char>(object, name, access, layout_.dtype, layout_.limit, "the sums, `limit` of them");
    }

    // Bools, which torch, numpy and cupy all keep as bytes; null for None.
    const bool* flags(const py::object& object, const char* name, int64_t count, const char* of_what) {
        if (object.is_none()) return nullptr;
        Array& array = arrays_.emplace_back(as_movable(object, name, Access::kRead));
        require_count(array.buffer.num_bytes(), count, name, of_what);
        return reinterpret_cast<const bool*>(add(array, name, Access::kRead));
    }

    const Array& last() const { return arrays_.back(); }
    Arguments& arguments() { return arguments_; }

   private:
    char* add(const Array& array, const char* name, Access access) {
        if (access == Access::kWrite) {
            arguments_.writes(array, name);
        } else {
            arguments_.reads(array, name);
        }
        return array.buffer.bytes();
    }

    const EntryLayout& layout_;
    std::vector<Array> arrays_;  // never moved: `arguments_` points to them
    Arguments arguments_;
};

int64_t verdict_bytes(const EntryLayout& layout, int64_t num_ranks) {
    return VerdictLayout(layout, num_ranks).num_bytes;
}

void pack_entries_of(const EntryLayout& layout, py::handle message, py::handle verdict, py::handle num_ranks,
                     py::handle values, py::handle indices, const py::object& largest, py::handle flat,
                     const py::object& velocity, const py::object& keeps, const py::object& finite,
                     const py::object& fingerprint) {
    Given given(layout);
    Taken taken;
    char* const to = given.bytes(message, "message", Access::kWrite, layout.num_bytes);
    const int64_t ranks = at_least(num_ranks, "num_ranks", 1);
    char* const prepared = given.bytes(verdict, "verdict", Access::kWrite, verdict_bytes(layout, ranks));
    taken.values =
        given.exactly<char>(values, "values", Access::kRead, layout.dtype, layout.count, "the sums, `count` of them");
    taken.indices =
        given.exactly<int32_t>(indices, "indices", Access::kRead, DType::kI32, layout.count, "int32, `count` of them");
    if (layout.half) {
        if (largest.is_none()) throw ArgumentTypeError("largest is None, wanted one float32 to scale half values with");
        taken.largest = given.exactly<float>(largest, "largest", Access::kRead, DType::kF32, 1, "one float32");
    }
    taken.flat = given.sums(flat, "flat", Access::kWrite);
    if (!velocity.is_none()) taken.velocity = given.sums(velocity, "velocity", Access::kWrite);
    taken.keeps = given.flags(keeps, "keeps", layout.count, "one bool per entry");
    if (finite.is_none()) throw ArgumentTypeError("finite is None, wanted one bool per parameter");
    taken.finite = given.flags(finite, "finite", layout.num_params, "one bool per parameter");
    taken.fingerprint = given.flags(fingerprint, "fingerprint", layout.num_bits, "one bool per bit");
    given.arguments().require_apart();
    dispatch(
        given.arguments(), [&](auto& call) { cuda::pack_entries(layout, taken, to, prepared, call.stream()); },
        [&] { pack_entries(layout, taken, to); });
}

void unpack_entries_of(const EntryLayout& layout, py::handle messages, py::handle num_ranks, py::handle factor,
                       py::handle most, py::handle indices, py::handle verdict, py::handle scratch) {
    Scratch* const memory = scratch_of(scratch);
    Given given(layout);
    const auto ranks = static_cast<int>(at_least(num_ranks, "num_ranks", 1));
    const char* const from = given.bytes(messages, "messages", Access::kRead, ranks * layout.num_bytes);
    auto* const to = given.exactly<int32_t>(indices, "indices", Access::kWrite, DType::kI32, ranks * layout.count,
                                            "int32, `count` of each rank");
    char* const answer = given.bytes(verdict, "verdict", Access::kWrite, verdict_bytes(layout, ranks));
    const double limit = as_number(most, "most");
    const Factor by(factor);
    by.add_to(given.arguments());
    given.arguments().require_apart();
    dispatch(
        given.arguments(),
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::unpack_entries_workspace_bytes(layout, ranks));
            cuda::unpack_entries(layout, from, ranks, by.on_gpu(), limit, to, answer, workspace, call.stream());
        },
        [&] { unpack_entries(layout, from, ranks, by.on_cpu(), limit, to, answer); });
}

// The state that add_entries may put back: pairs of arrays, as it is and as it was.
std::vector<StateChange> states_of(Given& given, const std::vector<std::pair<py::object, py::object>>& states,
                                   const Array& out) {
    if (states.size() > 2) throw ArgumentError(format("there are %zu states, wanted at most two", states.size()));
    std::vector<StateChange> changes;
    for (const auto& [now, before] : states) {
        char* const to = given.sums(now, "state", Access::kWrite);
        const char* const from = given.sums(before, "state before", Access::kRead);
        given.arguments().may_be(out, given.last());
        changes.push_back({to, from});
    }
    return changes;
}

void add_entries_of(const EntryLayout& layout, py::handle messages, py::handle num_ranks, py::handle indices,
                    py::handle factor, py::handle out, const std::vector<std::pair<py::object, py::object>>& states,
                    const py::object& finite, const py::object& used, const py::object& ends,
                    const py::object& last_sources, py::handle verdict, int num_threads) {
    Given given(layout);
    Outcome outcome;
    const auto ranks = static_cast<int>(at_least(num_ranks, "num_ranks", 1));
    const Array sums = as_array(out, "out", Access::kWrite);
    require_floating(sums.buffer, "out");
    require_count(sums.buffer.count, layout.limit, "out", "`limit` of the layout");
    given.arguments().writes(sums, "out");
    outcome.out = sums.buffer;
    const char* const from = given.bytes(messages, "messages", Access::kRead, ranks * layout.num_bytes);
    const auto* const places = given.exactly<int32_t>(indices, "indices", Access::kRead, DType::kI32,
                                                      ranks * layout.count, "int32, `count` of each rank");
    const char* const verdict_ = given.bytes(verdict, "verdict", Access::kRead, verdict_bytes(layout, ranks));
    outcome.states = states_of(given, states, sums);
    outcome.finite = given.flags(finite, "finite", 1, "one bool");
    outcome.used = given.flags(used, "used", layout.num_params, "one bool per parameter");
    if (outcome.used != nullptr) {
        outcome.ends = given.exactly<int64_t>(ends, "ends", Access::kRead, DType::kI64, layout.num_params,
                                              "int64, the end of every parameter");
    }
    if (!last_sources.is_none()) {
        outcome.last_sources = given.exactly<int64_t>(last_sources, "last_sources", Access::kWrite, DType::kI64, ranks,
                                                      "int64, one for each rank");
    }
    const Factor by(factor);
    by.add_to(given.arguments());
    given.arguments().require_apart();
    dispatch(
        given.arguments(),
        [&](auto& call) {
            cuda::add_entries(layout, from, ranks, places, by.on_gpu(), outcome, verdict_, call.stream());
        },
        [&] { add_entries(layout, from, ranks, places, by.on_cpu(), outcome, verdict_, num_threads); });
}

}  // namespace

void bind_entries(py::module_& module) {
    py::class_<EntryLayout>(module, "EntryLayout")
        .def(py::init(&make_layout), py::arg("num_params"), py::arg("num_bits"), py::arg("count"), py::arg("limit"),
             py::arg("dtype"), py::arg("half"))
        .def_readonly("num_params", &EntryLayout::num_params)
        .def_readonly("num_bits", &EntryLayout::num_bits)
        .def_readonly("count", &EntryLayout::count)
        .def_readonly("limit", &EntryLayout::limit)
        .def_readonly("num_bytes", &EntryLayout::num_bytes)
        .def(
            "verdict_places",
            [](const EntryLayout& layout, py::handle num_ranks) {
                const VerdictLayout at(layout, at_least(num_ranks, "num_ranks", 1));
                return py::make_tuple(at.finite_at, at.sources_at, at.used_at, at.differing_at, at.num_bytes);
            },
            py::arg("num_ranks"));
    module.def("pack_entries", &pack_entries_of, py::arg("layout"), py::arg("message"), py::arg("verdict"),
               py::arg("num_ranks"), py::arg("values"), py::arg("indices"), py::arg("largest"), py::arg("flat"),
               py::arg("velocity"), py::arg("keeps"), py::arg("finite"), py::arg("fingerprint"));
    module.def("unpack_entries", &unpack_entries_of, py::arg("layout"), py::arg("messages"), py::arg("num_ranks"),
               py::arg("factor"), py::arg("most"), py::arg("indices"), py::arg("verdict"), py::arg("scratch"));
    module.def("add_entries", &add_entries_of, py::arg("layout"), py::arg("messages"), py::arg("num_ranks"),
               py::arg("indices"), py::arg("factor"), py::arg("out"), py::arg("states"), py::arg("finite"),
               py::arg("used"), py::arg("ends"), py::arg("last_sources"), py::arg("verdict"), py::arg("num_threads"));
}

}  // namespace pycomm
