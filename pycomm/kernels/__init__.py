"""Kernels: arrays in, arrays out.

Inputs are torch tensors, numpy or cupy arrays, or anything with ``__dlpack__`` or
``__cuda_array_interface__``; outputs are given by the caller or made in the caller's library. Inputs
that are not contiguous are copied first; outputs must be contiguous. No kernel records gradients.

Arrays on a GPU must all be on the same one. The kernel runs on torch's current stream, or on the one
that the CUDA array interface names, after whatever other streams the arrays name. No kernel waits for
the GPU. With ``PYCOMM_SYNC=1`` in the environment each call does, and raises its own errors.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from pycomm.checks import lazy_names as _lazy_names
from pycomm.kernels.absmax import absmax
from pycomm.kernels.accumulate import Decay, Momentum, accumulate
from pycomm.kernels.arrays import FittingScale, Scratch, cuda_devices, num_threads, set_num_threads
from pycomm.kernels.hashes import hashes
from pycomm.kernels.norms import squared_norms
from pycomm.kernels.pack import pack, pack_flagged, unpack
from pycomm.kernels.reduce import reduce
from pycomm.kernels.scatter_add import scatter_add
from pycomm.kernels.sparsify import sparsify
from pycomm.kernels.topk import topk

if _TYPE_CHECKING:  # imported at first use: `attach` needs none of them
    from pycomm.kernels.chunks import Chunks, accumulate_chunks, pack_chunks, unpack_chunks
    from pycomm.kernels.entries import EntryLayout, Gathered, Taken, add_entries, pack_entries, unpack_entries
    from pycomm.kernels.indices import pack_indices, packed_words, unpack_indices
    from pycomm.kernels.low_rank import (
        LowRank,
        accumulate_low_rank,
        expand_low_rank,
        orthogonalize,
        split_low_rank,
    )
    from pycomm.kernels.quantization import Quantization, accumulate_quantized, dequantize, quantize, requantize
    from pycomm.kernels.signs import pack_signs, sign_words, unpack_signs
    from pycomm.kernels.step import (
        Moments,
        adagrad_step,
        adam_step,
        lamb_apply,
        lamb_moments,
        momentum_step,
        rmsprop_step,
    )

_HOMES = {
    "chunks": "Chunks accumulate_chunks pack_chunks unpack_chunks",
    "entries": "EntryLayout Gathered Taken add_entries pack_entries unpack_entries",
    "indices": "pack_indices packed_words unpack_indices",
    "low_rank": "LowRank accumulate_low_rank expand_low_rank orthogonalize split_low_rank",
    "quantization": "Quantization accumulate_quantized dequantize quantize requantize",
    "signs": "pack_signs sign_words unpack_signs",
    "step": "Moments adagrad_step adam_step lamb_apply lamb_moments momentum_step rmsprop_step",
}

__getattr__, __dir__ = _lazy_names(__name__, _HOMES)

__all__ = [
    "Chunks",
    "Decay",
    "EntryLayout",
    "FittingScale",
    "Gathered",
    "LowRank",
    "Moments",
    "Momentum",
    "Quantization",
    "Scratch",
    "Taken",
    "absmax",
    "accumulate",
    "accumulate_chunks",
    "accumulate_low_rank",
    "accumulate_quantized",
    "adagrad_step",
    "adam_step",
    "add_entries",
    "cuda_devices",
    "dequantize",
    "expand_low_rank",
    "hashes",
    "lamb_apply",
    "lamb_moments",
    "momentum_step",
    "num_threads",
    "orthogonalize",
    "pack",
    "pack_chunks",
    "pack_entries",
    "pack_flagged",
    "pack_indices",
    "pack_signs",
    "packed_words",
    "quantize",
    "reduce",
    "requantize",
    "rmsprop_step",
    "scatter_add",
    "set_num_threads",
    "sign_words",
    "sparsify",
    "split_low_rank",
    "squared_norms",
    "topk",
    "unpack",
    "unpack_chunks",
    "unpack_entries",
    "unpack_indices",
    "unpack_signs",
]
