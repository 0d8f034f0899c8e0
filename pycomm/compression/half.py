"""Half precision on the wire: half the bytes of float32.

Casting before dividing by the world size overflows float16, dividing first underflows it. So a
power of two per bucket is agreed before the cast: the largest magnitude on any rank, times the
world size, lands in the top octave of float16. The sum then cannot overflow, on any transport, and
the division happens in float32 after the way back. Price: one read of the gradients and one
all-reduce of 4 bytes per bucket. bfloat16 has float32's range and needs neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pycomm import kernels
from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.base import DenseExchange, Flag, Method, Scaling, as_flag
from pycomm.layout import laid_out_like

_TOP = 15  # 2**15 is half of what float16 reaches: room for roundings on the way


def agreed_scale(largest: torch.Tensor, size: int) -> torch.Tensor:
    """The power of two that brings ``largest * size`` below, and near, the top of float16.

    ``largest``: the largest magnitude on any rank, a 0-d float32 tensor; not finite or 0 gives 1.
    Computed where it lies, without waiting for a GPU.
    """
    _, exponent = torch.frexp(largest)  # largest <= 2 ** exponent
    fitting = (_TOP - math.ceil(math.log2(size)) - exponent).clamp(-126, 126)
    scale = ((fitting + 127) << 23).view(torch.float32)  # its bits: exact, where a power function need not be
    return torch.where(torch.isfinite(largest) & (largest > 0.0), scale, 1.0)


class HalfExchange(DenseExchange):
    """Cast to ``wire_dtype``, all-reduce the sum there, cast and divide back."""

    def __init__(self, bucket: Bucket, communicator: Communicator, wire_dtype: torch.dtype, scaled: bool) -> None:
        super().__init__(bucket, communicator)
        self._scaled = scaled
        self._wire = communicator.empty(bucket.num_elements + bucket.num_flags, wire_dtype, bucket.device)
        self._scratch, self._unpack_scratch = kernels.Scratch(), kernels.Scratch()
        self._result_fits = True

    def exchange(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        bucket, size = self._bucket, self._communicator.size
        self._all_used_here = all(grad is not None for grad in grads)
        self._result_fits = scaling.average or bucket.dtype != torch.float16
        parts = self._parts(grads)
        scale = self._agree(parts, scaling.local) if self._scaled else 1.0
        whole = self._wire[: bucket.num_elements]
        limit = bucket.limit(self._wire.dtype)
        fits = kernels.pack(parts, whole, scale * scaling.local, limit=limit, scratch=self._scratch)
        bucket.set_flags(grads, [fits], scaling.fingerprint)
        self._wire[bucket.num_elements :] = bucket.flags
        self._communicator.all_reduce(self._wire, "sum", bucket.algorithm)
        self.bytes_sent += self._wire.nbytes
        kernels.unpack(whole, [bucket.flat], scaling.result / (size * scale), scratch=self._unpack_scratch)
        bucket.flags.copy_(self._wire[bucket.num_elements :])

    def finite(self) -> Flag:
        """The sum fits on the wire; in float16 gradients, which have no scale, it may not."""
        finite = self._bucket.finite()
        if not self._result_fits:
            finite = finite & torch.isfinite(kernels.absmax([self._bucket.flat]))
        return as_flag(finite, self._bucket)

    def _agree(self, parts: Sequence[torch.Tensor], local: float | torch.Tensor) -> torch.Tensor:
        largest = kernels.absmax(parts, scratch=self._scratch) * local
        self._communicator.all_reduce(largest, "max")
        self.bytes_sent += largest.nbytes
        return agreed_scale(largest, self._communicator.size)

    def _parts(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """``grads`` in the bucket's memory order; zeros, written to the bucket, where there is none."""
        return [
            laid_out_like(view.zero_() if grad is None else grad, view)
            for grad, view in zip(grads, self._bucket.views, strict=True)
        ]


@dataclass(frozen=True)
class FP16(Method):
    """Gradients travel as float16, scaled per bucket by a power of two that all ranks agree on."""

    def make(self, bucket: Bucket, communicator: Communicator) -> HalfExchange:
        return HalfExchange(bucket, communicator, torch.float16, scaled=True)


@dataclass(frozen=True)
class BF16(Method):
    """Gradients travel as bfloat16: float32's range, 8 bits of precision."""

    def make(self, bucket: Bucket, communicator: Communicator) -> HalfExchange:
        return HalfExchange(bucket, communicator, torch.bfloat16, scaled=False)
