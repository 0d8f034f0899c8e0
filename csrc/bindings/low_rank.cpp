#include "kernels/low_rank.h"

#include "bindings/accumulation_arguments.h"
#include "bindings/bindings.h"
#include "bindings/kernel_arguments.h"

namespace pycomm {
namespace {

// Shapes of matrices, and how many elements they have.
struct Shapes {
    std::vector<LowRankShape> all;
    int64_t num_m = 0, num_p = 0, num_q = 0;

    // `shapes`: pairs of rows and columns.
    Shapes(py::handle shapes, py::handle rank) {
        const int64_t most = as_integer(rank, "rank");
        if (most < 1) throw ArgumentError("rank is " + shown(rank) + ", wanted at least 1");
        for (py::handle pair : shapes) {
            const std::string name = name_of_item("shapes", all.size());
            if (!py::isinstance<py::tuple>(pair) || py::len(pair) != 2) {
                throw ArgumentTypeError(name + " is " + shown(pair) + ", wanted a pair of ints");
            }
            auto numbers = py::reinterpret_borrow<py::tuple>(pair);
            const int64_t rows = as_integer(numbers[0], name), columns = as_integer(numbers[1], name);
            if (rows < 1 || columns < 1 || rows > INT32_MAX || columns > INT32_MAX) {
                throw ArgumentError(name + " is " + shown(pair) + ", wanted numbers from 1 to 2147483647");
            }
            const int64_t own = std::min({most, rows, columns});
            all.push_back({rows, columns, own});
            num_m += rows * columns;
            num_p += rows * own;
            num_q += columns * own;
        }
    }
};

Array as_matrices(py::handle object, const char* name, Access access, DType dtype, int64_t count) {
    Array array = as_exactly(object, name, access, dtype, count, "acc, as many as shapes and rank say");
    require_host(array, name);
    return array;
}

void accumulate_low_rank_arrays(py::handle grads, const py::dict& terms, py::handle shapes, py::handle rank,
                                py::handle q, py::handle p, int num_threads) {
    AccumulationArguments given(grads, terms);
    const Shapes matrices(shapes, rank);
    const DType dtype = given.job.acc.dtype;
    const Array from = as_matrices(q, "q", Access::kRead, dtype, matrices.num_q);
    const Array to = as_matrices(p, "p", Access::kWrite, dtype, matrices.num_p);
    require_count(static_cast<int64_t>(matrices.all.size()), static_cast<int64_t>(given.job.grads.size()), "shapes",
                  "one per gradient");
    for (size_t j = 0; j < matrices.all.size(); ++j) {
        require_count(given.job.grads[j].count, matrices.all[j].rows * matrices.all[j].columns,
                      name_of_item("grads", j), "as its shape says");
    }
    Arguments arguments;
    given.add_to(arguments);
    arguments.reads(from, "q");
    arguments.writes(to, "p");
    arguments.require_apart();
    const double factor = given.factor().on_cpu();
    py::gil_scoped_release release;
    accumulate_low_rank(given.job, factor, given.finite(), matrices.all, from.buffer.data, to.buffer.data, num_threads);
}

void split_low_rank_arrays(py::handle m, py::handle shapes, py::handle rank, py::handle p, py::handle q,
                           int num_threads) {
    const Array whole = as_array(m, "m", Access::kWrite);
    const Shapes matrices(shapes, rank);
    const DType dtype = whole.buffer.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    require_same(whole.buffer, "m", Buffer{nullptr, matrices.num_m, dtype}, "shapes, in float32 or float64");
    require_aligned(whole.buffer, "m");
    const Array from = as_matrices(p, "p", Access::kRead, dtype, matrices.num_p);
    const Array to = as_matrices(q, "q", Access::kWrite, dtype, matrices.num_q);
    Arguments arguments;
    arguments.writes(whole, "m");
    arguments.reads(from, "p");
    arguments.writes(to, "q");
    arguments.require_apart();
    py::gil_scoped_release release;
    split_low_rank(whole.buffer, matrices.all, from.buffer.data, to.buffer.data, num_threads);
}

void orthogonalize_array(py::handle p, py::handle shapes, py::handle rank, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    const Array columns = as_array(p, "p", Access::kWrite);
    const Shapes matrices(shapes, rank);
    const DType dtype = columns.buffer.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    require_same(columns.buffer, "p", Buffer{nullptr, matrices.num_p, dtype}, "shapes and rank, in float32 or float64");
    require_aligned(columns.buffer, "p");
    Arguments arguments;
    arguments.writes(columns, "p");
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::orthogonalize_workspace_bytes(matrices.all));
            cuda::orthogonalize(columns.buffer, matrices.all, workspace, call.stream());
        },
        [&] { orthogonalize(columns.buffer, matrices.all, num_threads); });
}

void expand_low_rank_arrays(py::handle out, py::handle shapes, py::handle rank, py::handle p, py::handle q,
                            py::handle scale, int num_threads) {
    const Array target = as_array(out, "out", Access::kWrite);
    const Shapes matrices(shapes, rank);
    const DType dtype = target.buffer.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    require_same(target.buffer, "out", Buffer{nullptr, matrices.num_m, dtype}, "shapes, in float32 or float64");
    require_aligned(target.buffer, "out");
    const Array left = as_matrices(p, "p", Access::kRead, dtype, matrices.num_p);
    const Array right = as_matrices(q, "q", Access::kRead, dtype, matrices.num_q);
    const Factor factor(scale);
    Arguments arguments;
    arguments.writes(target, "out");
    arguments.reads(left, "p");
    arguments.reads(right, "q");
    factor.add_to(arguments);
    arguments.require_apart();
    const double number = factor.on_cpu();
    py::gil_scoped_release release;
    expand_low_rank(target.buffer, matrices.all, left.buffer.data, right.buffer.data, number, num_threads);
}

}  // namespace

void bind_low_rank(py::module_& module) {
    auto shapes = py::arg("shapes"), rank = py::arg("rank"), p = py::arg("p"), q = py::arg("q");
    auto num_threads = py::arg("num_threads");
    module.def("accumulate_low_rank", &accumulate_low_rank_arrays, py::arg("grads"), py::arg("terms"), shapes, rank, q,
               p, num_threads);
    module.def("split_low_rank", &split_low_rank_arrays, py::arg("m"), shapes, rank, p, q, num_threads);
    module.def("orthogonalize", &orthogonalize_array, p, shapes, rank, py::arg("scratch"), num_threads);
    module.def("expand_low_rank", &expand_low_rank_arrays, py::arg("out"), shapes, rank, p, q, py::arg("scale"),
               num_threads);
}

}  // namespace pycomm
