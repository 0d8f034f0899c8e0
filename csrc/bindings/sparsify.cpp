#include "kernels/sparsify.h"

#include "bindings/accumulation_arguments.h"
#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

std::vector<int64_t> integers_of(py::handle sequence, const char* name) {
    if (!py::isinstance<py::sequence>(sequence) || py::isinstance<py::str>(sequence)) {
        throw ArgumentTypeError(std::string(name) + " is " + shown(sequence) + ", wanted a sequence of ints");
    }
    std::vector<int64_t> integers;
    for (py::handle item : py::reinterpret_borrow<py::sequence>(sequence)) {
        integers.push_back(as_integer(item, name_of_item(name, integers.size())));
    }
    return integers;
}

int64_t checked_total(const Accumulation& job, const std::vector<int64_t>& counts) {
    require_count(static_cast<int64_t>(counts.size()), static_cast<int64_t>(job.grads.size()), "counts",
                  "one per gradient");
    if (job.acc.count > INT32_MAX) {
        throw ArgumentError(format("acc has %lld elements, wanted at most 2147483647: indices are int32",
                                   static_cast<long long>(job.acc.count)));
    }
    int64_t total = 0;
    for (size_t j = 0; j < counts.size(); ++j) {
        if (counts[j] < 0 || counts[j] > job.grads[j].count) {
            throw ArgumentError(format("counts[%zu] is %lld, wanted 0 <= count <= %lld, the elements of grads[%zu]", j,
                                       static_cast<long long>(counts[j]), static_cast<long long>(job.grads[j].count),
                                       j));
        }
        total += counts[j];
    }
    return total;
}

// Outputs of one selection, held for the length of a call.
class SelectionArrays {
   public:
    Selection selection;

    SelectionArrays(const Accumulation& job, py::handle counts, py::handle values, py::handle indices,
                    py::handle thresholds, py::handle missed, const py::object& num_missed, const py::object& largest) {
        selection.counts = integers_of(counts, "counts");
        const int64_t total = checked_total(job, selection.counts);
        const auto num_grads = static_cast<int64_t>(selection.counts.size());
        auto written = [](py::handle object, const char* name, DType dtype, int64_t count, const char* of_what) {
            return as_exactly(object, name, Access::kWrite, dtype, count, of_what);
        };
        values_ = written(values, "values", job.acc.dtype, total, "acc, as many as counts say");
        indices_ = written(indices, "indices", DType::kI32, total, "int32, as many as counts say");
        thresholds_ = written(thresholds, "thresholds", DType::kF32, num_grads, "one float32 per gradient");
        missed_ = as_movable(missed, "missed", Access::kWrite);
        require_count(missed_.buffer.num_bytes(), num_grads, "missed", "one bool per gradient");
        selection.values = values_.buffer;
        selection.indices = static_cast<int32_t*>(indices_.buffer.data);
        selection.thresholds = static_cast<float*>(thresholds_.buffer.data);
        selection.missed = static_cast<bool*>(missed_.buffer.data);
        if (!num_missed.is_none()) {
            num_missed_ = written(num_missed, "num_missed", DType::kI32, 1, "one int32");
            selection.num_missed = static_cast<int32_t*>(num_missed_.buffer.data);
        }
        if (!largest.is_none()) {
            require_same(values_.buffer, "values", Buffer{nullptr, total, DType::kF32}, "`largest`, which is given");
            largest_ = written(largest, "largest", DType::kF32, 1, "one float32");
            selection.largest = static_cast<float*>(largest_.buffer.data);
        }
    }

    void add_to(Arguments& arguments) const {
        arguments.writes(values_, "values");
        arguments.writes(indices_, "indices");
        arguments.writes(thresholds_, "thresholds");
        arguments.writes(missed_, "missed");
        if (selection.num_missed != nullptr) arguments.writes(num_missed_, "num_missed");
        if (selection.largest != nullptr) arguments.writes(largest_, "largest");
    }

   private:
    Array values_, indices_, thresholds_, missed_, num_missed_, largest_;
};

void sparsify_arrays(py::handle grads, const py::dict& terms, py::handle counts, py::handle values, py::handle indices,
                     py::handle thresholds, py::handle missed, const py::object& num_missed, const py::object& largest,
                     py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    AccumulationArguments given(grads, terms);
    SelectionArrays outputs(given.job, counts, values, indices, thresholds, missed, num_missed, largest);
    const Selection& selection = outputs.selection;
    Arguments arguments;
    given.add_to(arguments);
    outputs.add_to(arguments);
    arguments.require_apart();
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::sparsify_workspace_bytes(given.job, selection));
            cuda::sparsify(given.job, given.factor().on_gpu(), selection, given.finite(), workspace, call.stream());
        },
        [&] { sparsify(given.job, given.factor().on_cpu(), selection, given.finite(), num_threads); });
}

}  // namespace

void bind_sparsify(py::module_& module) {
    auto scratch = py::arg("scratch");
    auto num_threads = py::arg("num_threads");
    module.def("sparsify", &sparsify_arrays, py::arg("grads"), py::arg("terms"), py::arg("counts"), py::arg("values"),
               py::arg("indices"), py::arg("thresholds"), py::arg("missed"), py::arg("num_missed"), py::arg("largest"),
               scratch, num_threads);
}

}  // namespace pycomm
