// Counts gradients as they are accumulated. With many small parameters, a hook written in Python would spend most of
// its time on this.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"

namespace pycomm {

namespace py = pybind11;

namespace {

// Open during one backward pass: then hooks may count without entering Python.
class PassGate {
   public:
    // current_task: returns the number of the backward pass that runs on this thread, -1 outside one.
    // current_stream: returns the current stream of the gradients' GPU; None for gradients in CPU memory.
    PassGate(py::object current_task, py::object current_stream)
        : current_task_(std::move(current_task)), current_stream_(std::move(current_stream)) {}

    void open() { task_ = number_from(current_task_); }
    void close() { task_ = kClosed; }
    bool is_open() const { return task_ >= 0 && task_ == number_from(current_task_); }
    bool has_streams() const { return !current_stream_.is_none(); }
    int64_t stream() const { return number_from(current_stream_); }

   private:
    static constexpr int64_t kClosed = -2;

    static int64_t number_from(const py::object& function) {
        auto result = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(function.ptr()));
        const int64_t number = result ? PyLong_AsLongLong(result.ptr()) : -1;
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        return number;
    }

    py::object current_task_, current_stream_;
    int64_t task_ = kClosed;
};

// How often each gradient of a bucket has been accumulated in this pass, and how often that is expected.
class GradientCounts {
   public:
    explicit GradientCounts(size_t num_gradients) : counts_(num_gradients) {}

    void begin_pass() {
        const bool known = std::all_of(counts_.begin(), counts_.end(), [](const Count& c) { return c.expected > 0; });
        for (Count& count : counts_) count.fired = 0;
        missing_ = known ? static_cast<int64_t>(counts_.size()) : kUnknown;
    }
    void end_pass() {
        for (Count& count : counts_) count.expected = std::max(count.expected, count.fired);
    }
    void note(size_t index) {
        Count& count = at(index);
        if (++count.fired == count.expected && missing_ > 0) --missing_;
    }
    // Counts the gradient, unless it has fired as often as expected before, or would complete the bucket.
    bool note_if_plain(size_t index) {
        const Count& count = at(index);
        if (count.fired >= count.expected) return false;
        if (count.fired + 1 == count.expected && missing_ <= 1) return false;
        note(index);
        return true;
    }
    void note_stream(int64_t stream) {
        if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
    }
    std::vector<int64_t> take_streams() { return std::exchange(streams_, {}); }
    bool is_complete() const { return missing_ == 0; }
    int64_t fired(size_t index) const { return at(index).fired; }
    int64_t expected(size_t index) const { return at(index).expected; }

   private:
    static constexpr int64_t kUnknown = -1;
    struct Count {
        int64_t fired = 0, expected = 0;
    };

    Count& at(size_t index) {
        if (index >= counts_.size()) throw ArgumentError("index is beyond the bucket's gradients");
        return counts_[index];
    }
    const Count& at(size_t index) const { return const_cast<GradientCounts*>(this)->at(index); }

    std::vector<Count> counts_;
    std::vector<int64_t> streams_;  // on which gradients were computed that have not been sent
    int64_t missing_ = kUnknown;
};

// Counter of one gradient, for its hook.
class GradientCounter {
   public:
    explicit GradientCounter(std::shared_ptr<PassGate> gate) : gate_(std::move(gate)) {}

    // Where to count from now on; null: nowhere, as each gradient must be handled.
    void count_in(std::shared_ptr<GradientCounts> counts, size_t index) {
        counts_ = std::move(counts);
        index_ = index;
    }

    // Counts the gradient of `param` if it can. Returns whether it did: nothing else has to be done for it then.
    bool count(PyObject* param) {
        static PyObject* const kGrad = PyUnicode_InternFromString("grad");
        if (counts_ == nullptr || !gate_->is_open()) return false;
        auto grad = py::reinterpret_steal<py::object>(PyObject_GetAttr(param, kGrad));
        if (!grad) throw py::error_already_set();
        if (grad.is_none()) return false;
        if (!gate_->has_streams()) return counts_->note_if_plain(index_);
        const int64_t stream = gate_->stream();
        if (!counts_->note_if_plain(index_)) return false;
        counts_->note_stream(stream);
        return true;
    }

   private:
    std::shared_ptr<PassGate> gate_;
    std::shared_ptr<GradientCounts> counts_;
    size_t index_ = 0;
};

// What a hook of autograd is: a builtin function, as pybind11's take several times as long to call. It counts, or calls
// the handler.
struct Hook {
    std::shared_ptr<GradientCounter> counter;
    py::object handler;
};
constexpr const char* kHookName = "pycomm.Hook";

Hook* hook_in(PyObject* capsule) { return static_cast<Hook*>(PyCapsule_GetPointer(capsule, kHookName)); }

PyObject* call_hook(PyObject* self, PyObject* param) {
    Hook* const hook = hook_in(self);
    try {
        if (hook->counter->count(param)) Py_RETURN_NONE;
    } catch (py::error_already_set& error) {
        error.restore();
        return nullptr;
    }
    return PyObject_CallOneArg(hook->handler.ptr(), param);
}

PyMethodDef hook_definition = {"pycomm_gradient_hook", call_hook, METH_O, nullptr};

py::object hook_of(std::shared_ptr<GradientCounter> counter, py::object handler) {
    auto self =
        py::reinterpret_steal<py::object>(PyCapsule_New(new Hook{std::move(counter), std::move(handler)}, kHookName,
                                                        [](PyObject* capsule) { delete hook_in(capsule); }));
    return py::reinterpret_steal<py::object>(PyCFunction_New(&hook_definition, self.ptr()));
}

// The handler of a hook made by hook_of; None for any other object.
py::object handler_of(py::handle hook) {
    if (PyCFunction_Check(hook.ptr()) == 0 || PyCFunction_GetFunction(hook.ptr()) != call_hook) return py::none();
    return hook_in(PyCFunction_GetSelf(hook.ptr()))->handler;
}

}  // namespace

void bind_gradient_counts(py::module_& module) {
    py::class_<PassGate, std::shared_ptr<PassGate>>(module, "PassGate")
        .def(py::init<py::object, py::object>(), py::arg("current_task"), py::arg("current_stream") = py::none())
        .def("open", &PassGate::open)
        .def("close", &PassGate::close);
    py::class_<GradientCounts, std::shared_ptr<GradientCounts>>(module, "GradientCounts")
        .def(py::init<size_t>(), py::arg("num_gradients"))
        .def("begin_pass", &GradientCounts::begin_pass)
        .def("end_pass", &GradientCounts::end_pass)
        .def("note", &GradientCounts::note, py::arg("index"))
        .def("note_stream", &GradientCounts::note_stream, py::arg("stream"))
        .def("take_streams", &GradientCounts::take_streams)
        .def("is_complete", &GradientCounts::is_complete)
        .def("fired", &GradientCounts::fired, py::arg("index"))
        .def("expected", &GradientCounts::expected, py::arg("index"));
    py::class_<GradientCounter, std::shared_ptr<GradientCounter>>(module, "GradientCounter")
        .def(py::init<std::shared_ptr<PassGate>>(), py::arg("gate"))
        .def("count_in", &GradientCounter::count_in, py::arg("counts"), py::arg("index"))
        .def("hook", &hook_of, py::arg("handler"));
    module.def("handler_of", &handler_of, py::arg("hook"));
}

}  // namespace pycomm
