"""Kernels: arrays in, arrays out.

Inputs are torch tensors, numpy arrays, or anything with ``__dlpack__``; outputs are given by the
caller or made in the caller's library. Inputs that are not contiguous are copied first; outputs
must be contiguous. No kernel records gradients.
"""

from pycomm.kernels.absmax import absmax
from pycomm.kernels.accumulate import accumulate
from pycomm.kernels.pack import pack, unpack
from pycomm.kernels.reduce import reduce
from pycomm.kernels.scatter_add import scatter_add
from pycomm.kernels.threads import num_threads, set_num_threads
from pycomm.kernels.topk import topk

__all__ = [
    "absmax",
    "accumulate",
    "num_threads",
    "pack",
    "reduce",
    "scatter_add",
    "set_num_threads",
    "topk",
    "unpack",
]
