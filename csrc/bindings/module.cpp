#include "bindings/bindings.h"

PYBIND11_MODULE(_native, module) {
    module.doc() = "The compiled part of pycomm. Not public: use pycomm.kernels and pycomm.Communicator.";
    pycomm::bind_errors();
    pycomm::bind_kernels(module);
    pycomm::bind_accumulation(module);
    pycomm::bind_codes(module);
    pycomm::bind_hashes(module);
    pycomm::bind_steps(module);
    pycomm::bind_transport(module);
#if defined(PYCOMM_CUDA_VERSION)
    pycomm::bind_nccl(module);
    pycomm::bind_streams(module);
#endif
    pycomm::bind_build_info(module);
}
