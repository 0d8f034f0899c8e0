#include "bindings/bindings.h"

PYBIND11_MODULE(_native, module) {
    module.doc() = "The compiled part of pycomm. Not public: use pycomm.kernels and pycomm.Communicator.";
    pycomm::bind_errors();
    pycomm::bind_kernel_arguments(module);
    pycomm::bind_absmax(module);
    pycomm::bind_accumulate(module);
    pycomm::bind_chunks(module);
    pycomm::bind_entries(module);
    pycomm::bind_flight_ring(module);
    pycomm::bind_gradient_counts(module);
    pycomm::bind_gradients(module);
    pycomm::bind_hashes(module);
    pycomm::bind_indices(module);
    pycomm::bind_low_rank(module);
    pycomm::bind_norms(module);
    pycomm::bind_pack(module);
    pycomm::bind_quantize(module);
    pycomm::bind_reduce(module);
    pycomm::bind_scatter_add(module);
    pycomm::bind_signs(module);
    pycomm::bind_sparsify(module);
    pycomm::bind_step(module);
    pycomm::bind_topk(module);
    pycomm::bind_unpack(module);
    pycomm::bind_transport(module);
    pycomm::bind_group(module);
    pycomm::bind_messages(module);
    pycomm::bind_shared_memory(module);
    pycomm::bind_tcp(module);
    pycomm::bind_hierarchical(module);
#if defined(PYCOMM_CUDA_VERSION)
    pycomm::bind_nccl(module);
    pycomm::bind_streams(module);
#endif
    pycomm::bind_build_info(module);
}
