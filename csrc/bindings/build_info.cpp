#include "base/error.h"
#include "bindings/bindings.h"
#include "kernels/cpu/loops/loops.h"
#if defined(PYCOMM_CUDA_VERSION)
#include "kernels/cuda/probe.h"
#endif

namespace pycomm {

namespace py = pybind11;

void bind_build_info(py::module_& module) {
    module.def("build_info", [] {
        py::dict info;
        info["version"] = PYCOMM_VERSION;
#if defined(PYCOMM_CUDA_VERSION)
        info["cuda"] = PYCOMM_CUDA_VERSION;
#else
        info["cuda"] = py::none();
#endif
        info["simd"] = loops().name;
        info["compiler"] = PYCOMM_COMPILER;
        return info;
    });
    // Runs a kernel on the current device and says what came of it: "ok", or why it could not.
    module.def("probe_cuda", [] {
#if defined(PYCOMM_CUDA_VERSION)
        py::gil_scoped_release release;
        return probe_cuda();
#else
        return std::string("built without CUDA");
#endif
    });
}

}  // namespace pycomm
