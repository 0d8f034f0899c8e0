// Loops over the gradients of a bucket that would take most of a step's time in Python where parameters are small.
// Owners are objects with a `.grad`; views are the tensors of a bucket that are handed out, one for each owner.
#include <pybind11/stl.h>

#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/glance.h"

namespace pycomm {
namespace {

// An attribute whose name is made once.
class Attribute {
   public:
    explicit Attribute(const char* name) : name_(PyUnicode_InternFromString(name)) {}
    py::object of(PyObject* object) const {
        auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name_));
        if (!found) throw py::error_already_set();
        return found;
    }
    void set(PyObject* object, PyObject* value) const {
        if (PyObject_SetAttr(object, name_, value) != 0) throw py::error_already_set();
    }
    py::object call(PyObject* object) const {
        auto found = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object, name_));
        if (!found) throw py::error_already_set();
        return found;
    }

   private:
    PyObject* name_;  // never freed: objects must not die after the interpreter
};

const Attribute& grad() {
    static const Attribute* const attribute = new Attribute("grad");
    return *attribute;
}

int64_t number(const py::object& object) {
    const int64_t value = PyLong_AsLongLong(object.ptr());
    if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return value;
}

void require_pairs(const py::list& owners, const py::list& views) {
    if (owners.size() != views.size()) throw ArgumentError("owners and views differ in number");
}

PyObject* at(const py::list& list, size_t i) { return PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)); }

// The gradients, and whether any of them is sparse.
std::pair<py::list, bool> grads_of(const py::list& owners) {
    static const Attribute* const is_sparse = new Attribute("is_sparse");
    py::list grads(owners.size());
    bool any_sparse = false;
    for (size_t i = 0; i < owners.size(); ++i) {
        py::object one = grad().of(at(owners, i));
        any_sparse |= !one.is_none() && is_sparse->of(one.ptr()).ptr() == Py_True;
        grads[i] = std::move(one);
    }
    return {grads, any_sparse};
}

// Makes the views .grad of their owners: where there is a gradient, but for the owner number `but`.
void show_views(const py::list& owners, const py::list& views, int64_t but) {
    require_pairs(owners, views);
    for (size_t i = 0; i < owners.size(); ++i) {
        if (static_cast<int64_t>(i) == but) continue;
        const py::object now = grad().of(at(owners, i));
        if (!now.is_none() && now.ptr() != at(views, i)) grad().set(at(owners, i), at(views, i));
    }
}

// Makes the views .grad of their owners, or None where they are not used; returns the views' versions.
py::list hand_out_views(const py::list& owners, const py::list& views, const py::list& used) {
    static const Attribute* const version = new Attribute("_version");
    require_pairs(owners, views);
    require_pairs(owners, used);
    py::list versions(owners.size());
    for (size_t i = 0; i < owners.size(); ++i) {
        PyObject* const wanted = at(used, i) == Py_True ? at(views, i) : Py_None;
        if (grad().of(at(owners, i)).ptr() != wanted) grad().set(at(owners, i), wanted);
        versions[i] = version->of(at(views, i));
    }
    return versions;
}

// Numbers of the views that are not .grad of their owners, and of those which more than `alone` references from Python
// keep; whether C++ keeps one that is not .grad.
std::tuple<py::list, py::list, bool> dropped_views(const py::list& owners, const py::list& views, int64_t alone) {
    static const Attribute* const use_count = new Attribute("_use_count");
    require_pairs(owners, views);
    py::list dropped, kept;
    bool shared = false;
    for (size_t i = 0; i < owners.size(); ++i) {
        if (grad().of(at(owners, i)).ptr() == at(views, i)) continue;
        dropped.append(i);
        if (Py_REFCNT(at(views, i)) > alone) kept.append(i);
        shared = shared || number(use_count->call(at(views, i))) > 1;
    }
    return {dropped, kept, shared};
}

int64_t references(const py::list& tensors, size_t index) {
    if (index >= tensors.size()) throw ArgumentError("index is beyond the tensors");
    return Py_REFCNT(at(tensors, index));
}

// Addresses of the tensors' elements.
py::list addresses_of(const py::list& tensors) {
    static const Attribute* const data_ptr = new Attribute("data_ptr");
    py::list addresses(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) addresses[i] = data_ptr->call(at(tensors, i));
    return addresses;
}

// Initial shapes, dtypes and devices of tensors.
class FirstKinds {
   public:
    explicit FirstKinds(py::list tensors) : tensors_(std::move(tensors)) {
        for (size_t i = 0; i < tensors_.size(); ++i) first_.push_back(kind_of(at(tensors_, i)));
    }

    // Numbers of the tensors that have changed, and of those that are not ordinary ones, of which it is not known.
    py::list perhaps_changed() const {
        py::list found;
        for (size_t i = 0; i < first_.size(); ++i) {
            if (!first_[i].known || !kind_of(at(tensors_, i)).is(first_[i])) found.append(i);
        }
        return found;
    }

   private:
    struct Kind {
        bool known = false;
        DType dtype = DType::kF32;
        int device = Buffer::kHost;
        std::vector<int64_t> shape;

        bool is(const Kind& other) const {
            return known && dtype == other.dtype && device == other.device && shape == other.shape;
        }
    };

    static Kind kind_of(PyObject* tensor) {
        Glance seen;
        if (!glance(tensor, seen, true)) return {};
        return {true, seen.buffer.dtype, seen.buffer.device, {seen.shape, seen.shape + seen.ndim}};
    }

    py::list tensors_;
    std::vector<Kind> first_;
};

}  // namespace

void bind_gradients(py::module_& module) {
    auto owners = py::arg("owners"), views = py::arg("views"), tensors = py::arg("tensors");
    module.def("grads_of", &grads_of, owners);
    module.def("show_views", &show_views, owners, views, py::arg("but"));
    module.def("hand_out_views", &hand_out_views, owners, views, py::arg("used"));
    module.def("dropped_views", &dropped_views, owners, views, py::arg("alone"));
    module.def("references", &references, tensors, py::arg("index"));
    module.def("addresses_of", &addresses_of, tensors);
    py::class_<FirstKinds>(module, "FirstKinds")
        .def(py::init<py::list>(), tensors)
        .def("perhaps_changed", &FirstKinds::perhaps_changed);
}

}  // namespace pycomm
