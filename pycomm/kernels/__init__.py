"""Kernels: arrays in, arrays out.

Inputs are torch tensors, numpy or cupy arrays, or anything with ``__dlpack__`` or
``__cuda_array_interface__``; outputs are given by the caller or made in the caller's library. Inputs
that are not contiguous are copied first; outputs must be contiguous. No kernel records gradients.

Arrays on a GPU, all on the same one, are worked on there: on torch's current stream, or on the one
that the CUDA array interface names, ordered after whatever other streams the arrays name. No kernel
waits for the GPU. With ``PYCOMM_SYNC=1`` in the environment each call does, and reports what went
wrong in it.
"""

from pycomm.kernels.absmax import absmax
from pycomm.kernels.accumulate import accumulate
from pycomm.kernels.devices import cuda_devices
from pycomm.kernels.pack import pack, unpack
from pycomm.kernels.reduce import reduce
from pycomm.kernels.scatter_add import scatter_add
from pycomm.kernels.scratch import Scratch
from pycomm.kernels.threads import num_threads, set_num_threads
from pycomm.kernels.topk import topk

__all__ = [
    "Scratch",
    "absmax",
    "accumulate",
    "cuda_devices",
    "num_threads",
    "pack",
    "reduce",
    "scatter_add",
    "set_num_threads",
    "topk",
    "unpack",
]
