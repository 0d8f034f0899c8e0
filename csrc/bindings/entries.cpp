#include "kernels/entries.h"

#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

int64_t within(py::handle object, const char* name, int64_t least, int64_t most = INT32_MAX) {
    const int64_t value = as_integer(object, name);
    if (value >= least && value <= most) return value;
    throw ArgumentError(format("%s is %lld, wanted %lld <= %s <= %lld", name, static_cast<long long>(value),
                               static_cast<long long>(least), name, static_cast<long long>(most)));
}

int ranks_in(py::handle num_ranks) {
    constexpr int64_t kMost = 1 << 20;  // times the bytes of any message, this fits into 64 bits
    return static_cast<int>(within(num_ranks, "num_ranks", 1, kMost));
}

const EntryLayout& layout_in(py::handle object) {
    if (py::isinstance<EntryLayout>(object)) return object.cast<const EntryLayout&>();
    throw ArgumentTypeError("layout is " + shown(object) + ", wanted an EntryLayout");
}

EntryLayout make_layout(py::handle num_params, py::handle num_bits, py::handle count, py::handle limit,
                        py::handle dtype, py::handle half) {
    const std::string name = as_text(dtype, "dtype", "'float32' or 'float64'");
    const DType sums = dtype_named(name);
    if (sums != DType::kF32 && sums != DType::kF64) {
        throw ArgumentTypeError("dtype is " + name + ", wanted float32 or float64");
    }
    const bool as_half = as_flag(half, "half");
    if (as_half && sums != DType::kF32) throw ArgumentTypeError("half is True with float64 sums, wanted float32 sums");
    const int64_t range = within(limit, "limit", 1), entries = within(count, "count", 1, range);
    return {within(num_params, "num_params", 0), within(num_bits, "num_bits", 0), entries, range, sums, as_half};
}

// The arrays of one call, held for its length, with their names for errors.
class Given {
   public:
    explicit Given(const EntryLayout& layout) : layout_(layout) { arrays_.reserve(16); }

    char* bytes(py::handle object, const char* name, Access access, int64_t wanted) {
        char* const data = exactly<char>(object, name, access, DType::kU8, wanted, "uint8, as the layout says");
        if (reinterpret_cast<uintptr_t>(data) % kEntryAlignment == 0) return data;
        throw ArgumentError(std::string(name) + " is not aligned to 8 bytes");
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
    const uint8_t* flags(const py::object& object, const char* name, int64_t count, const char* of_what) {
        if (object.is_none()) return nullptr;
        Array& array = arrays_.emplace_back(as_movable(object, name, Access::kRead));
        const int64_t itemsize = array.unit * size_of(array.buffer.dtype);
        if (itemsize != 1) {
            throw ArgumentTypeError(
                format("%s has elements of %lld bytes, wanted bools", name, static_cast<long long>(itemsize)));
        }
        require_count(array.buffer.count, count, name, of_what);
        return reinterpret_cast<const uint8_t*>(add(array, name, Access::kRead));
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

void pack_entries_of(py::handle of_message, py::handle message, py::handle verdict, py::handle num_ranks,
                     py::handle values, py::handle indices, const py::object& largest, py::handle flat,
                     const py::object& velocity, const py::object& keeps, const py::object& finite,
                     const py::object& fingerprint) {
    const EntryLayout& layout = layout_in(of_message);
    Given given(layout);
    Taken taken;
    char* const to = given.bytes(message, "message", Access::kWrite, layout.num_bytes);
    char* const prepared = given.bytes(verdict, "verdict", Access::kWrite, verdict_bytes(layout, ranks_in(num_ranks)));
    taken.values =
        given.exactly<char>(values, "values", Access::kRead, layout.dtype, layout.count, "the sums, `count` of them");
    taken.indices =
        given.exactly<int32_t>(indices, "indices", Access::kRead, DType::kI32, layout.count, "int32, `count` of them");
    if (!largest.is_none()) {
        taken.largest = given.exactly<float>(largest, "largest", Access::kRead, DType::kF32, 1, "one float32");
    } else if (layout.half) {
        throw ArgumentTypeError("largest is None, wanted one float32 to scale half values with");
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

// The messages of all ranks, and what is found in them.
struct EntryMessages {
    int num_ranks;
    const char* bytes;
    int32_t* indices;
    char* verdict;

    // `found`: how indices and verdict are accessed.
    EntryMessages(Given& given, const EntryLayout& layout, py::handle of_ranks, py::handle messages, py::handle places,
                  py::handle answers, Access found)
        : num_ranks(ranks_in(of_ranks)),
          bytes(given.bytes(messages, "messages", Access::kRead, num_ranks * layout.num_bytes)),
          indices(given.exactly<int32_t>(places, "indices", found, DType::kI32, num_ranks * layout.count,
                                         "int32, `count` of each rank")),
          verdict(given.bytes(answers, "verdict", found, verdict_bytes(layout, num_ranks))) {}
};

void unpack_entries_of(py::handle of_message, py::handle messages, py::handle num_ranks, py::handle factor,
                       py::handle most, py::handle indices, py::handle verdict, py::handle scratch) {
    const EntryLayout& layout = layout_in(of_message);
    Scratch* const memory = scratch_of(scratch);
    Given given(layout);
    const EntryMessages all(given, layout, num_ranks, messages, indices, verdict, Access::kWrite);
    const double limit = as_number(most, "most");
    const Factor by(factor, "factor");
    by.add_to(given.arguments());
    given.arguments().require_apart();
    dispatch(
        given.arguments(),
        [&](auto& call) {
            const int64_t num_bytes = cuda::unpack_entries_workspace_bytes(layout, all.num_ranks);
            cuda::unpack_entries(layout, all.bytes, all.num_ranks, by.on_gpu(), limit, all.indices, all.verdict,
                                 call.workspace(memory, num_bytes), call.stream());
        },
        [&] { unpack_entries(layout, all.bytes, all.num_ranks, by.on_cpu(), limit, all.indices, all.verdict); });
}

// The state that add_entries may restore, as pairs of arrays: now and before.
std::vector<StateChange> states_of(Given& given, const std::vector<std::pair<py::object, py::object>>& states,
                                   const Array& out) {
    if (states.size() > 2) throw ArgumentError(format("there are %zu states, wanted at most two", states.size()));
    std::vector<StateChange> changes;
    for (const auto& [now, before] : states) {
        const std::string name = name_of_item("states", changes.size());
        char* const to = given.sums(now, (name + " now").c_str(), Access::kWrite);
        const char* const from = given.sums(before, (name + " before").c_str(), Access::kRead);
        given.arguments().may_be(out, given.last());
        changes.push_back({to, from});
    }
    return changes;
}

void add_entries_of(py::handle of_message, py::handle messages, py::handle num_ranks, py::handle indices,
                    py::handle factor, py::handle out, const std::vector<std::pair<py::object, py::object>>& states,
                    const py::object& finite, const py::object& used, const py::object& ends,
                    const py::object& last_sources, py::handle verdict, int num_threads) {
    const EntryLayout& layout = layout_in(of_message);
    Given given(layout);
    Outcome outcome;
    const Array sums = as_array(out, "out", Access::kWrite);
    require_floating(sums.buffer, "out");
    require_count(sums.buffer.count, layout.limit, "out", "`limit` of the layout");
    given.arguments().writes(sums, "out");
    outcome.out = sums.buffer;
    const EntryMessages all(given, layout, num_ranks, messages, indices, verdict, Access::kRead);
    outcome.states = states_of(given, states, sums);
    outcome.finite = given.flags(finite, "finite", 1, "one bool");
    outcome.used = given.flags(used, "used", layout.num_params, "one bool per parameter");
    if (!ends.is_none()) {
        outcome.ends = given.exactly<int64_t>(ends, "ends", Access::kRead, DType::kI64, layout.num_params,
                                              "int64, the end of every parameter");
    } else if (!used.is_none()) {
        throw ArgumentTypeError("ends is None, wanted the end of every parameter, since `used` is given");
    }
    if (!last_sources.is_none()) {
        outcome.last_sources = given.exactly<int64_t>(last_sources, "last_sources", Access::kWrite, DType::kI64,
                                                      all.num_ranks, "int64, one for each rank");
    }
    const Factor by(factor, "factor");
    by.add_to(given.arguments());
    given.arguments().require_apart();
    dispatch(
        given.arguments(),
        [&](auto& call) {
            cuda::add_entries(layout, all.bytes, all.num_ranks, all.indices, by.on_gpu(), outcome, all.verdict,
                              call.stream());
        },
        [&] {
            add_entries(layout, all.bytes, all.num_ranks, all.indices, by.on_cpu(), outcome, all.verdict, num_threads);
        });
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
                const VerdictLayout at(layout, ranks_in(num_ranks));
                return py::make_tuple(at.finite_at, at.sources_at, at.used_at, at.differing_at, at.borders_at,
                                      at.num_bytes);
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
