// Ring of the last operations on a group of ranks, for the flight recorder. An operation of 1 KB takes 2 us, the call
// included. Recording it may take only a small part of that, so it is not done in Python.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "base/time.h"
#include "bindings/bindings.h"
#include "bindings/collectives.h"
#include "bindings/glance.h"
#include "bindings/reduce_op.h"
#include "transport/group.h"

namespace pycomm {

namespace py = pybind11;

namespace {

// What is known of this thread's operations beyond their arguments. Callers that set it restore the old values.
struct Mark {
    PyObject* label = nullptr;     // what they are about
    PyObject* line = nullptr;      // line of the script that submitted the present job
    PyObject* listener = nullptr;  // called with True before each of them, and with False after it
};
thread_local Mark mark;

py::object or_none(PyObject* object) {
    return object == nullptr ? py::object(py::none()) : py::reinterpret_borrow<py::object>(object);
}

// Whose code a file holds: ours, a library's, or the script's. Its folder decides.
enum class Origin { kOwn, kLibrary, kScript };

class Origins {
   public:
    void set(std::vector<std::string> own, std::vector<std::string> libraries) {
        own_ = std::move(own);
        libraries_ = std::move(libraries);
        known_.clear();
    }

    // Looked up by the string object with the file's name, which all functions of a file share.
    Origin of(PyObject* name) {
        auto found = known_.find(name);
        if (found != known_.end()) return found->second.second;
        if (known_.size() >= kMost) known_.clear();
        const char* text = PyUnicode_AsUTF8(name);
        if (text == nullptr) PyErr_Clear();
        const std::string_view file = text == nullptr ? "" : text;
        const Origin origin = is_below(own_, file)         ? Origin::kOwn
                              : is_below(libraries_, file) ? Origin::kLibrary
                                                           : Origin::kScript;
        known_.emplace(name, std::make_pair(py::reinterpret_borrow<py::object>(name), origin));
        return origin;
    }

   private:
    static bool is_below(const std::vector<std::string>& prefixes, std::string_view file) {
        return std::any_of(prefixes.begin(), prefixes.end(),
                           [&](const std::string& prefix) { return file.substr(0, prefix.size()) == prefix; });
    }

    static constexpr size_t kMost = 4096;  // so that names of generated code do not pile up
    std::vector<std::string> own_, libraries_;
    std::unordered_map<PyObject*, std::pair<py::object, Origin>> known_;
};

Origins& origins() {
    static Origins* files = new Origins;  // never destroyed: the interpreter ends before static objects do
    return *files;
}

// A place in a function. Its line number is computed on demand: that takes longer than all the rest.
struct Line {
    py::object code;
    int place = 0;  // of an instruction; up to Python 3.10 it is the line
};

#if PY_VERSION_HEX >= 0x030B0000
int place_of(PyFrameObject* frame) { return PyFrame_GetLasti(frame); }
int number_of(PyCodeObject* code, int place) { return PyCode_Addr2Line(code, place); }
#else
int place_of(PyFrameObject* frame) { return PyFrame_GetLineNumber(frame); }
int number_of(PyCodeObject*, int place) { return place; }
#endif

// The innermost line of the script on this thread's stack; without one, the innermost of a library; empty on our own
// threads.
Line line_of_caller() {
    Line library;
    auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
    while (frame) {
        auto* at = reinterpret_cast<PyFrameObject*>(frame.ptr());
        auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(at)));
        const Origin origin = origins().of(reinterpret_cast<PyCodeObject*>(code.ptr())->co_filename);
        if (origin == Origin::kScript) return {std::move(code), place_of(at)};
        if (origin == Origin::kLibrary && !library.code) library = {std::move(code), place_of(at)};
        frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(at)));
    }
    return library;
}

py::object as_tuple(const Line& line, PyObject* otherwise) {
    if (!line.code) return or_none(otherwise);
    auto* code = reinterpret_cast<PyCodeObject*>(line.code.ptr());
    return py::make_tuple(or_none(code->co_filename), number_of(code, line.place), or_none(code->co_name));
}

struct RecordedOperation {
    uint64_t ticket = 0;  // counts all operations of the ring, from 1 on
    int64_t number = 0;   // counts collectives only
    py::object name, detail, label, submitted, error;
    py::object dtype;
    int64_t elements = -1;
    Line line;
    double began = 0.0, ended = 0.0;  // 0: it has not
};

class FlightRing {
   public:
    explicit FlightRing(int64_t length) {
        if (length < 1) throw ArgumentError("length must be at least 1");
        operations_.resize(static_cast<size_t>(length));
    }

    RecordedOperation& begin(bool collective) {
        RecordedOperation& next = operations_[tickets_++ % operations_.size()];
        next.ticket = tickets_;
        if (collective) ++count_;
        next.number = count_;
        next.error = py::none();
        next.ended = 0.0;
        return next;
    }
    // `began`: the time at which the operation began.
    void finish(uint64_t ticket, double began, bool collective, py::object error) {
        const double ended = monotonic_seconds();
        if (collective) seconds_ += ended - began;
        RecordedOperation& found = operations_[(ticket - 1) % operations_.size()];
        if (found.ticket != ticket) return;  // overwritten meanwhile
        found.ended = ended;
        found.error = std::move(error);
    }

    int64_t count() const { return count_; }
    double seconds() const { return seconds_; }
    py::list entries() const {
        py::list found;
        const uint64_t size = operations_.size();
        for (uint64_t k = tickets_ < size ? 0 : tickets_ - size; k < tickets_; ++k) {
            const RecordedOperation& one = operations_[k % size];
            py::object elements = one.elements < 0 ? py::object(py::none()) : py::object(py::int_(one.elements));
            py::object ended = one.ended == 0.0 ? py::object(py::none()) : py::object(py::float_(one.ended));
            found.append(py::make_tuple(one.number, one.name, one.dtype, elements, one.detail, one.label,
                                        as_tuple(one.line, one.submitted.ptr()), one.began, ended, one.error));
        }
        return found;
    }

   private:
    std::vector<RecordedOperation> operations_;
    uint64_t tickets_ = 0;
    int64_t count_ = 0;
    double seconds_ = 0.0;
};

// A function that records calls of another one, and passes them on.
struct Watched {
    std::shared_ptr<FlightRing> ring;
    py::object name, call, describe, failed;
    Group* group;  // whose all_reduce `call` is; else null
    Py_ssize_t array, first_noted, end_noted;
    bool collective;
};

// The object, or the name of its type if keeping it could keep memory, or printing it could run code.
py::object plain(PyObject* object) {
    const bool is_plain = PyUnicode_CheckExact(object) || PyLong_CheckExact(object) || object == Py_None;
    return is_plain ? or_none(object) : py::object(py::str(Py_TYPE(object)->tp_name));
}

// One argument, or a tuple of them.
py::object noted(const Watched& self, PyObject* const* args, Py_ssize_t count) {
    const Py_ssize_t end = std::min(self.end_noted, count);
    if (end <= self.first_noted) return py::tuple();
    if (end == self.first_noted + 1) return plain(args[self.first_noted]);
    py::tuple found(end - self.first_noted);
    for (Py_ssize_t i = self.first_noted; i < end; ++i) found[i - self.first_noted] = plain(args[i]);
    return found;
}

void describe_array(const Watched& self, PyObject* array, const Glance* seen, RecordedOperation& out) {
    static PyObject** const names = [] {
        auto* made = new PyObject*[16]();
        return made;
    }();
    if (seen != nullptr) {
        const auto k = static_cast<size_t>(seen->buffer.dtype) % 16;
        if (names[k] == nullptr) names[k] = PyUnicode_FromString(name_of(seen->buffer.dtype));
        out.dtype = or_none(names[k]);
        out.elements = seen->buffer.count;
        return;
    }
    auto told = py::reinterpret_steal<py::object>(PyObject_CallOneArg(self.describe.ptr(), array));
    if (!told) {
        PyErr_Clear();
        return;
    }
    auto pair = py::reinterpret_borrow<py::tuple>(told);
    out.dtype = pair[0];
    out.elements = pair[1].cast<int64_t>();
}

struct Begun {
    uint64_t ticket;
    double when;
};

Begun note(const Watched& self, PyObject* const* args, Py_ssize_t count, const Glance* seen) {
    RecordedOperation& made = self.ring->begin(self.collective);
    made.name = self.name;
    made.dtype = py::none();
    made.elements = -1;
    made.detail = noted(self, args, count);
    made.label = or_none(mark.label);
    made.submitted = or_none(mark.line);
    made.line = line_of_caller();
    const Begun begun{made.ticket, made.began = monotonic_seconds()};
    if (self.array >= 0 && self.array < count) describe_array(self, args[self.array], seen, made);
    return begun;
}

// The error that is set becomes the operation's, and stays set.
void note_error(const Watched& self, const Begun& begun) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    auto text = py::reinterpret_steal<py::object>(PyObject_Str(value));
    if (!text) PyErr_Clear();
    if (!text) text = py::str(Py_TYPE(value)->tp_name);
    self.ring->finish(begun.ticket, begun.when, self.collective, std::move(text));
    if (!self.failed.is_none()) {
        auto told = py::reinterpret_steal<py::object>(PyObject_CallOneArg(self.failed.ptr(), value));
        if (!told) PyErr_WriteUnraisable(self.failed.ptr());
    }
    PyErr_Restore(type, value, trace);
}

void tell_listener(PyObject* begins) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    auto told = py::reinterpret_steal<py::object>(PyObject_CallOneArg(mark.listener, begins));
    if (!told) PyErr_WriteUnraisable(mark.listener);
    PyErr_Restore(type, value, trace);
}

// What a call of an all-reduce passes, if no argument needs a closer look; else none.
std::optional<ReduceOp> small_reduction(const Watched& self, const Glance& x, PyObject* op, PyObject* timeout) {
    const bool is_small = self.group != nullptr && x.buffer.device == Buffer::kHost && x.is_contiguous() &&
                          x.buffer.num_bytes() <= kSmallBytes && PyFloat_CheckExact(timeout) != 0;
    const std::optional<ReduceOp> known = is_small ? known_reduce_op(op) : std::nullopt;
    return known && is_reducible(x.buffer, *known) ? known : std::nullopt;
}

PyObject* reduce_small(const Watched& self, const Buffer& x, ReduceOp op, PyObject* timeout) {
    try {
        all_reduce_small(*self.group, x, op, PyFloat_AS_DOUBLE(timeout));
    } catch (...) {
        py::detail::try_translate_exceptions();
        return nullptr;
    }
    return py::none().release().ptr();
}

// Records a call. seen: the array, if it was looked at; op: if that is all a small reduction needs.
PyObject* record(const Watched& self, PyObject* const* args, Py_ssize_t count, const Glance* seen,
                 std::optional<ReduceOp> op) {
    const Begun begun = note(self, args, count, seen);
    const bool has_listener = mark.listener != nullptr;  // which may run any code
    if (has_listener) tell_listener(Py_True);
    PyObject* result = op && !has_listener
                           ? reduce_small(self, seen->buffer, *op, args[2])
                           : PyObject_Vectorcall(self.call.ptr(), args, static_cast<size_t>(count), nullptr);
    if (result == nullptr) {
        note_error(self, begun);
    } else {
        self.ring->finish(begun.ticket, begun.when, self.collective, py::none());
    }
    if (mark.listener != nullptr) tell_listener(Py_False);
    return result;
}

PyObject* call_watched(PyObject* capsule, PyObject* const* args, Py_ssize_t count) {
    const auto& self = *static_cast<Watched*>(PyCapsule_GetPointer(capsule, nullptr));
    Glance seen;
    const bool is_seen = self.array >= 0 && self.array < count && glance(args[self.array], seen, self.group == nullptr);
    const auto op = is_seen && count == 3 ? small_reduction(self, seen, args[1], args[2]) : std::nullopt;
    return record(self, args, count, is_seen ? &seen : nullptr, op);
}

// The shortest way from Python to a small all-reduce.
struct AtOnce {
    py::object function;     // which call_watched() runs
    const Watched* watched;  // of it; null: another one
    py::object unfinished;   // operations that have to end first
    py::object timeout;
};

// Arguments: x, op and, if it is another one, timeout. Returns whether it was done.
PyObject* call_at_once(PyObject* capsule, PyObject* const* args, Py_ssize_t count) {
    const auto& self = *static_cast<AtOnce*>(PyCapsule_GetPointer(capsule, nullptr));
    Glance seen;
    const bool may_run = self.watched != nullptr && (count == 2 || count == 3) && py::len(self.unfinished) == 0;
    if (!may_run || !glance(args[0], seen)) Py_RETURN_FALSE;
    PyObject* const all[] = {args[0], args[1], count == 3 ? args[2] : self.timeout.ptr()};
    const auto op = small_reduction(*self.watched, seen, all[1], all[2]);
    if (!op) Py_RETURN_FALSE;
    PyObject* result = record(*self.watched, all, 3, &seen, op);
    if (result == nullptr) return nullptr;
    Py_DECREF(result);
    Py_RETURN_TRUE;
}

PyMethodDef watched_method = {"operation", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_watched)),
                              METH_FASTCALL, nullptr};
PyMethodDef at_once_method = {"at_once", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_at_once)),
                              METH_FASTCALL, nullptr};

template <class State>
py::object function_of(PyMethodDef& method, State state) {
    py::capsule capsule(new State(std::move(state)), [](void* one) { delete static_cast<State*>(one); });
    return py::reinterpret_steal<py::object>(PyCFunction_New(&method, capsule.ptr()));
}

py::object at_once(py::object function, py::object unfinished, double timeout) {
    const bool is_watched =
        PyCFunction_Check(function.ptr()) != 0 && PyCFunction_GET_FUNCTION(function.ptr()) == watched_method.ml_meth;
    PyObject* capsule = is_watched ? PyCFunction_GET_SELF(function.ptr()) : nullptr;
    const auto* watched = is_watched ? static_cast<Watched*>(PyCapsule_GetPointer(capsule, nullptr)) : nullptr;
    if (watched != nullptr && watched->group == nullptr) watched = nullptr;
    return function_of(at_once_method,
                       AtOnce{std::move(function), watched, std::move(unfinished), py::float_(timeout)});
}

py::object watch(std::shared_ptr<FlightRing> ring, py::object name, py::object call, Py_ssize_t array,
                 Py_ssize_t first_noted, Py_ssize_t end_noted, bool collective, py::object describe,
                 py::object failed) {
    Group* group = group_of_all_reduce(call);
    return function_of(watched_method, Watched{std::move(ring), std::move(name), std::move(call), std::move(describe),
                                               std::move(failed), group, array, first_noted, end_noted, collective});
}

// Returns the previous values, to be restored.
py::tuple exchange_mark(py::object label, py::object line) {
    py::tuple before = py::make_tuple(or_none(mark.label), or_none(mark.line));
    Py_XDECREF(mark.label);
    Py_XDECREF(mark.line);
    mark.label = label.is_none() ? nullptr : label.release().ptr();
    mark.line = line.is_none() ? nullptr : line.release().ptr();
    return before;
}

// Likewise.
py::object exchange_listener(py::object listener) {
    py::object before = or_none(mark.listener);
    Py_XDECREF(mark.listener);
    mark.listener = listener.is_none() ? nullptr : listener.release().ptr();
    return before;
}

}  // namespace

void bind_flight_ring(py::module_& module) {
    py::class_<FlightRing, std::shared_ptr<FlightRing>>(module, "FlightRing")
        .def(py::init<int64_t>(), py::arg("length"))
        .def("entries", &FlightRing::entries)
        .def_property_readonly("count", &FlightRing::count)
        .def_property_readonly("seconds", &FlightRing::seconds);
    module.def("watch_operation", &watch, py::arg("ring"), py::arg("name"), py::arg("call"), py::arg("array"),
               py::arg("first_noted"), py::arg("end_noted"), py::arg("collective"), py::arg("describe"),
               py::arg("failed"));
    module.def("all_reduce_at_once", &at_once, py::arg("function"), py::arg("unfinished"), py::arg("timeout"));
    module.def("exchange_mark", &exchange_mark, py::arg("label"), py::arg("line"));
    module.def("exchange_listener", &exchange_listener, py::arg("listener"));
    module.def("line_of_caller", [] { return as_tuple(line_of_caller(), mark.line); });
    module.def(
        "set_origins",
        [](std::vector<std::string> own, std::vector<std::string> libraries) {
            origins().set(std::move(own), std::move(libraries));
        },
        py::arg("own"), py::arg("libraries"));
}

}  // namespace pycomm
