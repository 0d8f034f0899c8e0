#include "bindings/prepared_step.h"

#include <algorithm>
#include <cstring>

#include "bindings/described.h"
#include "kernels/norms.h"

namespace pycomm {

PreparedStep::PreparedStep(const std::string& rule, const py::object& weights, const py::object& grads,
                           const py::object& copies, const std::vector<py::object>& states, const py::object& counts,
                           const std::vector<py::object>& mirrors) {
    StepArrays arrays(rule, {}, weights, grads, copies, states);
    Arguments arguments;
    arrays.add_to(arguments, true, true);
    job = arrays.job;
    for (Array& array : arrays.all()) held_.push_back(std::move(array.owner));
    if (!counts.is_none()) take_counts(as_arrays(counts, "counts", Access::kWrite), arguments);
    arguments.require_apart();
    take_mirrors(mirrors);
    auto add = [&](const std::vector<Buffer>& some) {
        for (const Buffer& one : some) {
            if (one.count > 0) written_.push_back({one.bytes(), one.bytes() + one.num_bytes()});
        }
    };
    add(job.weights);
    add(job.copies);
    for (const auto& some : job.states) add(some);
    add(job.counts);
    std::sort(written_.begin(), written_.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
}

void PreparedStep::take_mirrors(const std::vector<py::object>& mirrors) {
    const std::vector<Buffer>& mirrored = job.copies.empty() ? job.weights : job.copies;
    for (const py::object& some : mirrors) {
        if (job.weights[0].device != Buffer::kHost) {
            throw ArgumentError("mirrors are passed, wanted weights in CPU memory");
        }
        PerWeight each(some, "mirrors", Access::kWrite);
        each.require_shape_of(job.weights);
        for (size_t j = 0; j < each.arrays().size(); ++j) {
            const Array& array = each.arrays()[j];
            require_host(array, "mirrors");
            require_same(array.buffer, each.name_of_one(j), Buffer{nullptr, array.buffer.count, mirrored[j].dtype},
                         "the array that it mirrors");
            shared_.push_back(array);
        }
        job.mirrors.push_back(each.buffers());
    }
}

void PreparedStep::take_counts(const std::vector<Array>& counts, Arguments& arguments) {
    require_count(static_cast<int64_t>(counts.size()), static_cast<int64_t>(job.weights.size()), "counts",
                  "one for each of weights");
    for (size_t j = 0; j < counts.size(); ++j) {
        require_same(counts[j].buffer, name_of_item("counts", j), Buffer{nullptr, 1, DType::kF32}, "a count of steps");
        require_aligned(counts[j].buffer, name_of_item("counts", j));
    }
    arguments.writes(counts, "counts");
    job.counts = buffers_of(counts);
    for (const Array& count : counts) held_.push_back(count.owner);
}

// The written extents do not overlap, so they end in the order in which they begin.
bool PreparedStep::is_apart_from(const Buffer& array) const {
    if (array.count == 0) return true;
    const char *begin = array.bytes(), *end = begin + array.num_bytes();
    auto next = std::lower_bound(written_.begin(), written_.end(), end,
                                 [](const Extent& extent, const char* at) { return extent.begin < at; });
    return next == written_.begin() || (next - 1)->end <= begin;
}

// One array that stands for all of them: they do not overlap, and lie on one device.
Array PreparedStep::example() const {
    Array out;
    for (const Buffer& weight : job.weights) {
        if (out.buffer.count == 0) out.buffer = weight;
    }
    out.owner = held_.front();
    out.is_torch = is_ordinary_tensor(out.owner);
    return out;
}

void PreparedStep::run(const std::string& rule, const Coefficients& coefficients, const py::object& rates,
                       const py::object& squares, py::handle scale, py::handle divisor, py::handle found,
                       py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    if (held_.empty()) throw ArgumentError("the arrays of this step were released, wanted a new one");
    job.rule = rule_named(rule);
    job.coefficients = coefficients;
    StepNumbers numbers(rates, squares, job.weights.size());
    numbers.give_to(job);
    Factor factor(scale, "scale", divisor);
    Array verdict;
    if (!found.is_none()) {
        verdict = as_exactly(found, "found", Access::kRead, DType::kF32, 1, "one float32");
    }
    job.found = static_cast<const float*>(verdict.buffer.data);
    const Array weights = example();
    Arguments arguments;
    arguments.reads(weights, "weights");
    if (job.found != nullptr) arguments.reads(verdict, "found");
    numbers.add_to(arguments);
    factor.add_to(arguments);
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::step_workspace_bytes(job));
            cuda::step(job, factor.on_gpu(), workspace, call.stream());
        },
        [&] { step(job, factor.on_cpu(), num_threads); });
}

void PreparedStep::norms(py::handle squares, py::handle scratch, int num_threads) {
    Scratch* const memory = scratch_of(scratch);
    if (held_.empty()) throw ArgumentError("the arrays of this step were released, wanted a new one");
    std::vector<Buffer> buffers = job.weights;
    buffers.insert(buffers.end(), job.grads.begin(), job.grads.end());
    Array target = as_exactly(squares, "squares", Access::kWrite, DType::kF64, static_cast<int64_t>(buffers.size()),
                              "one float64 for each weight and each gradient");
    auto answer = static_cast<double*>(target.buffer.data);
    const Array weights = example();
    Arguments arguments;
    arguments.writes(target, "squares");
    arguments.reads(weights, "weights");
    dispatch(
        arguments,
        [&](auto& call) {
            cuda::Workspace& workspace = call.workspace(memory, cuda::norms_workspace_bytes(buffers));
            cuda::norms(buffers, answer, workspace, call.stream());
        },
        [&] { pycomm::norms(buffers, answer, num_threads); });
}

namespace {

bool are_usual(py::handle params, py::handle state, py::handle masters) {
    bool has_masters = !masters.is_none();
    return PyList_Check(params.ptr()) && PyDict_Check(state.ptr()) && (!has_masters || PyDict_Check(masters.ptr()));
}

// Null, without an exception, where there is none.
PyObject* entry_of(PyObject* dict, PyObject* key) {
    PyObject* found = PyDict_GetItemWithError(dict, key);
    if (found == nullptr) PyErr_Clear();
    return found;
}

py::object gradient_of(PyObject* param) {
    static PyObject* const kGrad = PyUnicode_InternFromString("grad");
    auto grad = py::reinterpret_steal<py::object>(PyObject_GetAttr(param, kGrad));
    if (!grad) PyErr_Clear();
    return grad;
}

double number_in(const Buffer& count) {
    if (count.dtype == DType::kF64) {
        double value;
        std::memcpy(&value, count.data, sizeof value);
        return value;
    }
    float value;
    std::memcpy(&value, count.data, sizeof value);
    return value;
}

void put_number(const Buffer& count, double value) {
    if (count.dtype == DType::kF64) {
        std::memcpy(count.data, &value, sizeof value);
    } else {
        auto narrow = static_cast<float>(value);
        std::memcpy(count.data, &narrow, sizeof narrow);
    }
}

}  // namespace

PreparedGroup::PreparedGroup(std::vector<std::shared_ptr<PreparedStep>> parts, py::tuple keys, bool has_counts,
                             bool same_counts)
    : parts_(std::move(parts)), has_counts_(has_counts), same_counts_(same_counts), held_(parts_.size()) {
    if (keys.size() > kMostStates) throw ArgumentError("more than three states");
    for (py::handle key : keys) {
        keys_.push_back(key.is_none() ? nullptr : PyUnicode_InternFromString(key.cast<std::string>().c_str()));
    }
}

bool PreparedGroup::remember(py::handle params, py::handle state, py::handle masters, const std::vector<int>& part_of,
                             const std::vector<int64_t>& begins) {
    if (!are_usual(params, state, masters) || part_of.size() != py::len(params)) return false;
    if (begins.size() != part_of.size()) throw ArgumentError("begins requires one number for each parameter");
    std::vector<size_t> places(parts_.size(), 0);
    for (size_t i = 0; i < part_of.size(); ++i) {
        Slot slot;
        slot.part = part_of[i];
        slot.begin = begins[i];
        slot.dimensions = dimensions_.size();
        Glance seen;
        if (slot.part >= 0) {
            slot.place = places.at(static_cast<size_t>(slot.part))++;
            if (!glance(PyList_GET_ITEM(params.ptr(), static_cast<Py_ssize_t>(i)), seen)) return false;
            slot.ndim = seen.ndim;
            dimensions_.insert(dimensions_.end(), seen.shape, seen.shape + seen.ndim);
            dimensions_.insert(dimensions_.end(), seen.strides, seen.strides + seen.ndim);
        }
        slots_.push_back(slot);
    }
    // Gradients are not checked: in the first step they may have any layout.
    bool recognized = true;
    for (size_t i = 0; i < slots_.size() && recognized; ++i) {
        PyObject* param = PyList_GET_ITEM(params.ptr(), static_cast<Py_ssize_t>(i));
        recognized = slots_[i].part < 0 || look(slots_[i], param, state.ptr(), masters.ptr());
    }
    forget();
    return recognized;
}

py::object PreparedGroup::renew(py::handle params, py::handle state, py::handle masters) {
    release();
    if (!look_at_all(params, state, masters) || !count_steps()) {
        release();
        return py::none();
    }
    for (size_t p = 0; p < parts_.size(); ++p) parts_[p]->hold(std::move(held_[p]));
    py::list written(written_.size());
    for (size_t i = 0; i < written_.size(); ++i) written[i] = written_[i];
    return written;
}

void PreparedGroup::release() {
    for (auto& part : parts_) part->hold({});
    forget();
}

void PreparedGroup::forget() {
    held_.assign(parts_.size(), {});
    counts_.clear();
    written_.clear();
}

bool PreparedGroup::look_at_all(py::handle params, py::handle state, py::handle masters) {
    if (!are_usual(params, state, masters)) return false;
    for (size_t i = 0; i < slots_.size(); ++i) {
        Slot& slot = slots_[i];
        if (static_cast<size_t>(PyList_GET_SIZE(params.ptr())) != slots_.size())
            return false;  // checked each time: Python code runs in between
        auto param = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(params.ptr(), static_cast<Py_ssize_t>(i)));
        py::object grad = gradient_of(param.ptr());
        if (!grad || grad.is_none() != (slot.part < 0)) return false;
        if (slot.part < 0) continue;
        if (!look(slot, param.ptr(), state.ptr(), masters.ptr()) || !take_gradient(slot, grad)) return false;
    }
    return static_cast<size_t>(PyList_GET_SIZE(params.ptr())) == slots_.size();
}

bool PreparedGroup::look(Slot& slot, PyObject* param, PyObject* state, PyObject* masters) {
    const PreparedStep& part = *parts_[static_cast<size_t>(slot.part)];
    PyObject* master = masters == Py_None ? nullptr : entry_of(masters, param);
    if ((master != nullptr) == part.job.copies.empty()) return false;
    PyObject* weight = master == nullptr ? param : master;
    if (!fits(slot, 0, weight, part.job.weights[slot.place])) return false;
    written_.push_back(py::reinterpret_borrow<py::object>(weight));
    if (master != nullptr) {
        if (!fits(slot, 1, param, part.job.copies[slot.place])) return false;
        written_.push_back(py::reinterpret_borrow<py::object>(param));
    }
    bool needs_entry = has_counts_ || std::any_of(keys_.begin(), keys_.end(), [](auto* key) { return key != nullptr; });
    if (!needs_entry) return true;
    PyObject* entry = entry_of(state, param);
    return entry != nullptr && PyDict_Check(entry) != 0 && look_at_entry(slot, entry, part);
}

bool PreparedGroup::look_at_entry(Slot& slot, PyObject* entry, const PreparedStep& part) {
    static PyObject* const kStep = PyUnicode_InternFromString("step");
    for (size_t s = 0; s < keys_.size(); ++s) {
        if (keys_[s] == nullptr) continue;
        PyObject* state = entry_of(entry, keys_[s]);
        if (state == nullptr || !fits(slot, 3 + s, state, part.job.states[s][slot.place])) return false;
    }
    if (!has_counts_) return true;
    PyObject* count = entry_of(entry, kStep);
    return count != nullptr && look_at_count(slot, count, part);
}

bool PreparedGroup::look_at_count(Slot& slot, PyObject* count, const PreparedStep& part) {
    Glance seen;
    if (!glance(count, seen, slot.seen[2] == count) || seen.buffer.count != 1) return false;
    if (!part.job.counts.empty()) {
        const Buffer& known = part.job.counts[slot.place];
        if (seen.buffer.dtype != known.dtype || seen.buffer.data != known.data) return false;
    } else {
        bool is_number = seen.buffer.dtype == DType::kF32 || seen.buffer.dtype == DType::kF64;
        if (!is_number || seen.buffer.device != Buffer::kHost) return false;
        counts_.push_back({seen.buffer, slot.part, number_in(seen.buffer) + 1.0});
    }
    slot.seen[2] = count;
    held_[static_cast<size_t>(slot.part)].push_back(py::reinterpret_borrow<py::object>(count));
    return true;
}

bool PreparedGroup::take_gradient(const Slot& slot, const py::object& grad) {
    PreparedStep& part = *parts_[static_cast<size_t>(slot.part)];
    Glance seen;
    if (!glance(grad.ptr(), seen) || !is_like(slot, seen)) return false;
    const Buffer& weight = part.job.weights[slot.place];
    const Buffer found = stepped(slot, seen.buffer, weight.count);
    bool aligned = reinterpret_cast<uintptr_t>(found.data) % static_cast<uintptr_t>(size_of(found.dtype)) == 0;
    if (!aligned || !is_floating(found.dtype) || found.device != weight.device) return false;
    if (!part.is_apart_from(found)) return false;
    part.job.grads[slot.place] = found;
    held_[static_cast<size_t>(slot.part)].push_back(grad);
    return true;
}

bool PreparedGroup::fits(Slot& slot, size_t what, PyObject* tensor, const Buffer& wanted) {
    Glance seen;
    if (!glance(tensor, seen, slot.seen[what] == tensor) || !is_like(slot, seen)) return false;
    if (slot.begin + wanted.count > seen.buffer.count) return false;
    const Buffer found = stepped(slot, seen.buffer, wanted.count);
    if (found.dtype != wanted.dtype || found.device != wanted.device) return false;
    if (found.data != wanted.data && wanted.count > 0) return false;
    slot.seen[what] = tensor;
    held_[static_cast<size_t>(slot.part)].push_back(py::reinterpret_borrow<py::object>(tensor));
    return true;
}

// The stepped range of a tensor that lies like the parameter.
Buffer PreparedGroup::stepped(const Slot& slot, const Buffer& whole, int64_t count) {
    Buffer out = whole;
    out.data = whole.bytes() + slot.begin * size_of(whole.dtype);
    out.count = count;
    return out;
}

bool PreparedGroup::is_like(const Slot& slot, const Glance& seen) const {
    const int64_t* shape = dimensions_.data() + slot.dimensions;
    return seen.lies_like(slot.ndim, shape, shape + slot.ndim);
}

// Nothing is written before all counts are known to be good.
bool PreparedGroup::count_steps() {
    std::vector<double> next(parts_.size(), 0.0);
    for (const Count& count : counts_) {
        double& of_part = next[static_cast<size_t>(count.part)];
        bool differs = same_counts_ && of_part != 0.0 && of_part != count.next;
        if (!(count.next >= 1.0 && count.next < 1e15) || differs) return false;
        of_part = count.next;
    }
    for (const Count& count : counts_) put_number(count.buffer, count.next);
    for (size_t p = 0; p < parts_.size(); ++p) parts_[p]->taken = static_cast<int64_t>(next[p]);
    return true;
}

}  // namespace pycomm
