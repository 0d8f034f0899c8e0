#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/bindings.h"
#include "device/runtime.h"
#include "kernels/cpu/loops/loops.h"

namespace pycomm {

namespace py = pybind11;

void bind_build_info(py::module_& module) {
    module.def("build_info", [] {
        py::dict info;
        info["version"] = PYCOMM_VERSION;
#if defined(PYCOMM_CUDA_VERSION)
        info["cuda"] = PYCOMM_CUDA_VERSION;
        info["cuda_architectures"] = PYCOMM_CUDA_ARCHITECTURES;
#else
        info["cuda"] = py::none();
        info["cuda_architectures"] = py::none();
#endif
        info["simd"] = loops().name;
        info["compiler"] = PYCOMM_COMPILER;
        return info;
    });
    module.def("simd", [] { return std::string(loops().name); });
    module.def(
        "select_simd",
        [](const std::string& name) {
            if (!select_loops(name.c_str())) throw ArgumentError("this build or processor has no " + name);
        },
        py::arg("name"));
    // Number of GPUs that the kernels can use and, if there are none, why.
    module.def("cuda_devices", [] {
#if defined(PYCOMM_CUDA_VERSION)
        int devices = device::count();
        return std::pair{devices, devices > 0 ? std::string() : device::why_none()};
#else
        return std::pair{0, std::string("this build has no CUDA kernels")};
#endif
    });
}

}  // namespace pycomm
