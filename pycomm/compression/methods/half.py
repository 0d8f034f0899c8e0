"""Half precision: half the bytes of float32.

Casting before dividing by the world size overflows float16; dividing first underflows it. So the ranks
agree on a power of two per bucket before the cast, which brings the largest magnitude on any rank, times
the world size, to the top octave of float16. The sum then cannot overflow, on any transport, and the
division happens in float32 after the cast back. The price is one read of the gradients and one all-reduce
of 4 bytes per bucket. bfloat16 has float32's range and requires neither.

Sums in float32 have two hops: each rank gets a part of every other's message, adds the parts up in float32, and
rounds the sum once; then all gather the sums. Ranks that share a host, among several hosts, do so first among
themselves, and then among the hosts: two roundings. An all-reduce in the half type may round after each addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pycomm import checks, kernels
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import laid_out_like
from pycomm.compression.base import Flag, Method, Operation, Scaling, as_flag
from pycomm.compression.codec import agreed_scale
from pycomm.compression.dense import DenseExchange, reduce_message

_SUMS = ("auto", "float32", "native")


class HalfExchange(DenseExchange):
    """Exchange that casts to a half type, sums up, casts back and divides.

    Args:
        half_dtype: the dtype that travels.
        scaled: multiply by a power of two that all ranks agree on, to use the range of that dtype.
        sums: see :class:`FP16`.
    """

    def __init__(
        self, bucket: Bucket, communicator: Communicator, half_dtype: torch.dtype, scaled: bool, sums: str
    ) -> None:
        super().__init__(bucket, communicator)
        self._scaled = scaled
        self.packs_apart = not scaled
        if sums == "auto":
            between_hosts = not bucket.on_gpu and len(communicator.hosts) > 1 and bucket.algorithm == "auto"
            sums = "float32" if between_hosts else "native"
        length, size = bucket.num_elements + bucket.num_flags, communicator.size
        memory = communicator.empty(-(-length // size) * size, half_dtype, bucket.device).zero_()
        self._message, self._rows = memory[:length], memory.view(size, -1)
        self._received = torch.zeros_like(memory) if sums == "float32" else None
        self._scratch, self._largest_scratch, self._unpack_scratch, self._sum_scratch = (
            kernels.Scratch() for _ in range(4)
        )
        self._result_fits = True

    def exchange(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        bucket, size = self._bucket, self._communicator.size
        self._all_used_here = all(grad is not None for grad in grads)
        self._result_fits = scaling.average or bucket.dtype != torch.float16
        scale = self._agree(grads, scaling.local) if self._scaled else 1.0
        bucket.pack_flagged(grads, self._message, scale * scaling.local, scaling.fingerprint, self._scratch)
        if not bucket.on_gpu:
            bucket.flags.copy_(self._message[bucket.num_elements :])
        found = self._find_source(grads)
        sums = self._message
        if self._received is None or bucket.shares is not None:  # which are summed up in float32 anyway
            reduce_message(self._communicator, bucket, sums, "sum")
        else:
            self._sum_in_two_hops(self._received)
            sums = self._received
        self.bytes_sent += self._message.nbytes
        whole, flags = sums[: bucket.num_elements], sums[bucket.num_elements : len(self._message)]
        own, factor = bucket.own, scaling.result / (size * scale)
        kernels.unpack(whole[own], [bucket.flat[own]], factor, scratch=self._unpack_scratch)
        bucket.flags.copy_(flags)
        if not found and self._is_too_large():
            self._nonfinite_source = None  # it was that of an earlier step

    def _sum_in_two_hops(self, out: torch.Tensor) -> None:
        """Write the sums, computed in float32 and rounded once, to ``out``."""
        communicator, own = self._communicator, self._rows[self._communicator.rank]
        if self._bucket.on_gpu:
            communicator.all_to_all(out, self._rows)
            kernels.reduce(own, out.view_as(self._rows).unbind(), "sum", scratch=self._sum_scratch)
        else:
            communicator.channel.reduce_scatter_v(own, self._rows.unbind(), "sum")
        communicator.all_gather(out, own)

    def operations_among(self, size: int) -> list[Operation] | None:
        if self._received is None or self._bucket.shares is not None:
            return None
        part = -(-len(self._message) // size) * self._message.itemsize
        agreement = [Operation("all_reduce", torch.float32.itemsize)] if self._scaled else []
        return [*agreement, Operation("all_to_all", size * part), Operation("all_gather", part)]

    def finite(self) -> Flag:
        """Return whether the sum is finite: in the message, and in float16 gradients, whose range is no larger."""
        finite = self._bucket.finite()
        if not self._result_fits:
            finite = finite & torch.isfinite(kernels.absmax([self._bucket.flat]))
        return as_flag(finite, self._bucket)

    def _agree(self, grads: Sequence[torch.Tensor | None], local: float | torch.Tensor) -> torch.Tensor:
        parts = [laid_out_like(g, view) for g, view in zip(grads, self._bucket.views, strict=True) if g is not None]
        largest = kernels.absmax(parts or [self._bucket.flat[:0]], scratch=self._largest_scratch) * local
        self._communicator.all_reduce(largest, "max")
        self.bytes_sent += largest.nbytes
        return agreed_scale(largest, self._communicator.size)


@dataclass(frozen=True)
class FP16(Method):
    """Gradients as float16, scaled per bucket by a power of two that all ranks agree on.

    Args:
        sum: "float32": sums are computed in float32 and rounded once, by two hops. "native": by one all-reduce in
            float16, which on a GPU, over Gloo and between hosts may round after each addition. "auto": "float32"
            between hosts in CPU memory, unless an ``algorithm`` is given, else "native".

    Raises:
        TypeError, ValueError: ``sum`` is none of these.
    """

    sum: str = "auto"

    def __post_init__(self) -> None:
        checks.choice("sum", self.sum, _SUMS)

    def make(self, bucket: Bucket, communicator: Communicator) -> HalfExchange:
        return HalfExchange(bucket, communicator, torch.float16, scaled=True, sums=self.sum)


@dataclass(frozen=True)
class BF16(Method):
    """Gradients as bfloat16: float32's range, 8 bits of precision. ``sum``: see :class:`FP16`."""

    sum: str = "auto"

    def __post_init__(self) -> None:
        checks.choice("sum", self.sum, _SUMS)

    def make(self, bucket: Bucket, communicator: Communicator) -> HalfExchange:
        return HalfExchange(bucket, communicator, torch.bfloat16, scaled=False, sums=self.sum)
