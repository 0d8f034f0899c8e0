"""Half precision: half the bytes of float32.

Casting before dividing by the world size overflows float16; dividing first underflows it. So the ranks
agree on a power of two per bucket before the cast, which brings the largest magnitude on any rank, times
the world size, to the top octave of float16. The sum then cannot overflow, on any transport, and the
division happens in float32 after the cast back. The price is one read of the gradients and one all-reduce
of 4 bytes per bucket. bfloat16 has float32's range and requires neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pycomm import checks, kernels
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import laid_out_like
from pycomm.compression.base import Flag, Method, Scaling, as_flag
from pycomm.compression.dense import IS_THERE, DenseExchange, reduce_message
from pycomm.descriptions import settings_text

_SUMS = ("native", "float32")
_HALF_EXPONENT = 15  # 2**15 is half of float16's range: room for roundings on the way


def _room_of_sum(size: int) -> int:
    """Return the exponent below which ``size`` terms must stay, so that float16 can hold their sum."""
    return _HALF_EXPONENT - math.ceil(math.log2(size))


class HalfExchange(DenseExchange):
    """Exchange that casts to a half type, all-reduces the sum in it, casts back and divides.

    Args:
        scaled: multiply by a power of two that all ranks agree on, to use the range of that dtype.
    """

    def __init__(
        self, bucket: Bucket, communicator: Communicator, half_dtype: torch.dtype, scaled: bool, sums: str
    ) -> None:
        super().__init__(bucket, communicator)
        # In CPU memory the transport's own sums are in float32.
        self._algorithm = bucket.algorithm if sums == "native" else "direct" if bucket.on_gpu else "native"
        self._scaled = scaled
        self._message = communicator.empty(
            bucket.num_elements + bucket.num_flags, half_dtype, bucket.device, symmetric=True
        )
        self._scratch, self._largest_scratch, self._unpack_scratch = (kernels.Scratch() for _ in range(3))
        self._result_fits = True
        self._taken: tuple[Sequence[torch.Tensor | None], Scaling] | None = None
        self._largest: torch.Tensor | None = None  # magnitude of the gradients here

    def pack(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        bucket = self._bucket
        self._all_used_here = all(map(IS_THERE, grads))
        self._result_fits = scaling.average or bucket.dtype != torch.float16
        if not self._scaled:
            bucket.pack_flagged(grads, self._message, scaling.local, scaling.fingerprint, self._scratch)
            if scaling.frees:
                grads = bucket.places_in(self._message)
        else:
            parts = [laid_out_like(g, place) for g, place in zip(grads, bucket.places, strict=True) if g is not None]
            largest = kernels.absmax(parts or [bucket.flat[:0]], scratch=self._largest_scratch)
            is_plain = isinstance(scaling.local, float) and scaling.local == 1.0
            self._largest = largest if is_plain else largest * scaling.local
            if bucket.on_gpu or scaling.frees:  # the cast has to wait for the scale, and the gradients' memory must not
                bucket.gather(grads)
                grads = [None if grad is None else place for grad, place in zip(grads, bucket.places, strict=True)]
        self._taken = grads, scaling

    def send(self) -> None:
        assert self._taken is not None
        bucket, size, (grads, scaling) = self._bucket, self._communicator.size, self._taken
        factor: Any = scaling.result / size
        if self._largest is not None:
            self._communicator.all_reduce(self._largest, "max")
            self.bytes_sent += self._largest.nbytes
            room = _room_of_sum(size)
            scale = kernels.FittingScale(scaling.local, self._largest, room)
            bucket.pack_flagged(grads, self._message, scale, scaling.fingerprint, self._scratch)
            factor = kernels.FittingScale(factor, self._largest, room, inverse=True)
        whole, flags = self._message[: bucket.num_elements], self._message[bucket.num_elements :]
        found = False
        if not bucket.on_gpu:
            bucket.flags.copy_(flags)
            found = float(bucket.too_large_flag) != 0.0 and self._find_source(grads)
        reduce_message(self._communicator, bucket, self._message, "sum", self._algorithm)
        self.bytes_sent += self._message.nbytes
        own = bucket.own
        kernels.unpack(whole[own], [bucket.flat[own]], factor, scratch=self._unpack_scratch)
        bucket.flags.copy_(flags)
        if not bucket.on_gpu:
            self._taken = None
            if not found and float(bucket.too_large_flag) != 0.0:
                self._nonfinite_source = None  # an earlier step's

    def finite(self) -> Flag:
        """Return whether the sum is finite: in the message, and in float16 gradients, whose range is no larger."""
        finite = self._bucket.finite()
        if not self._result_fits:
            finite = finite & torch.isfinite(kernels.absmax([self._bucket.flat]))
        return as_flag(finite, self._bucket)


class _HalfMethod(Method):
    """Base of the methods, with their argument ``sum``."""

    sum: str
    reduces_parts = True

    def __post_init__(self) -> None:
        checks.choice("sum", self.sum, _SUMS)

    def __repr__(self) -> str:
        return settings_text(self)  # servers compare it with the text in older checkpoints


@dataclass(frozen=True, repr=False)
class FP16(_HalfMethod):
    """Gradients as float16, scaled per bucket by a power of two that all ranks agree on.

    Args:
        sum: "native": as :meth:`pycomm.Communicator.all_reduce` adds up. In CPU memory that is in float32, and between
            hosts by two hops; NCCL adds in float16. "float32": also on GPUs, and whatever ``algorithm`` says, by two
            hops: each rank adds up its part of all messages in float32, rounds once, and all gather the sums.

    Raises:
        TypeError, ValueError: ``sum`` is neither.
    """

    sum: str = "native"

    def make(self, bucket: Bucket, communicator: Communicator) -> HalfExchange:
        return HalfExchange(bucket, communicator, torch.float16, scaled=True, sums=self.sum)


@dataclass(frozen=True, repr=False)
class BF16(_HalfMethod):
    """Gradients as bfloat16: float32's range, 8 bits of precision. ``sum``: see :class:`FP16`."""

    sum: str = "native"

    def make(self, bucket: Bucket, communicator: Communicator) -> HalfExchange:
        return HalfExchange(bucket, communicator, torch.bfloat16, scaled=False, sums=self.sum)
