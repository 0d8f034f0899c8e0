"""Interface of codecs: how a part of a bucket's accumulated gradients is sent."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pycomm import kernels
from pycomm.collectives.bucket import Bucket
from pycomm.compression.base import Defaults, Flag
from pycomm.compression.report import Report, Told


@dataclass(frozen=True)
class Summands:
    """Arguments of :func:`pycomm.kernels.accumulate` for one bucket.

    Attributes:
        acc, residual, grads, scale: its first four. options: the others, by name.
        whole: whether all of the sums must be in ``acc`` until the codec sends.
    """

    acc: torch.Tensor
    residual: torch.Tensor | None
    grads: Sequence[torch.Tensor]
    scale: float | torch.Tensor
    options: Mapping[str, Any]
    whole: bool = False

    @property
    def arrays(self) -> tuple[Any, Any, Any, Any]:
        """The first four, in order."""
        return self.acc, self.residual, self.grads, self.scale


@dataclass(frozen=True)
class Accumulated:
    """Gradients added to what earlier steps left unsent; a codec sends part of them.

    Attributes:
        flat: the sums, one flat tensor for the bucket: float32 or float64. The codec subtracts what it
            sends.
        velocity: velocities, which a codec may zero where it sends entries (momentum factor masking);
            or ``None``.
        factor: factor that turns a sum over the ranks, in units of ``flat``, into ``.grad``.
        most: largest magnitude that ``.grad`` can hold.
    """

    flat: torch.Tensor
    velocity: torch.Tensor | None
    factor: float | torch.Tensor = 1.0
    most: float = math.inf

    def fits(self, largest: torch.Tensor, top: float = 1.0) -> torch.Tensor:
        """Return whether ``.grad`` can hold sums of magnitude ``largest`` times ``top``: a 0-d bool."""
        if isinstance(self.factor, torch.Tensor):
            return largest * self.factor <= self.most / top
        return largest <= self.most / top / self.factor


@dataclass(frozen=True)
class Outcome:
    """Arguments of :meth:`RankSum.settle`, once it is known whether the step is finite on all ranks.

    Attributes:
        sums: flat memory of the sums' dtype that may be overwritten; perhaps the bucket's own.
        states: pairs of flat state: after this step, and before it.
        finite: on the CPU true; on a GPU a tensor: if it is false, state is restored.
        used: for each parameter, whether its change of state stays; ``None``: all do.
        last: receives the report's evidence if ``finite`` is a false tensor.
    """

    bucket: Bucket
    sums: torch.Tensor
    factor: float | torch.Tensor
    states: list[tuple[torch.Tensor, torch.Tensor]]
    finite: Flag
    used: torch.Tensor | None
    report: Report
    last: torch.Tensor
    scratch: kernels.Scratch


class RankSum(Defaults):
    """Sum over the ranks of what each has sent of its accumulated gradients. On a GPU only ``stats`` waits.

    Attributes:
        top: factor of :meth:`largest`.
    """

    top = 1.0

    def __init__(self) -> None:
        self.bytes_sent = 0

    def largest(self) -> torch.Tensor:
        """Return a bound on the magnitudes that :meth:`write` gives with factor 1, divided by ``top``; 0-d float64."""
        raise NotImplementedError

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        """Write the sum over the ranks of what they sent, times ``factor``, to flat ``out``."""
        raise NotImplementedError

    def finite(self, report: Report, accumulated: Accumulated) -> torch.Tensor:
        """Return whether all that was sent is finite, and its sum over the ranks fits: a 0-d bool."""
        # Finite terms can still overflow in the sum, or once the loss scale is back: no rank may commit then.
        return report.finite() & accumulated.fits(self.largest(), self.top)

    def settle(self, outcome: Outcome) -> None:
        """Write the sum over the ranks of what they sent to the bucket; restore state where ``outcome`` says so."""
        for now, before in outcome.states:
            _put_back(outcome, now, before)
        factor, finite = outcome.factor, outcome.finite
        if isinstance(finite, torch.Tensor):
            torch.where(finite, outcome.last, outcome.report.evidence(), out=outcome.last)
            factor = torch.where(finite, on_device(finite.device, factor), on_device(finite.device, math.nan))
        sums, averages = outcome.sums, outcome.bucket.flat
        if sums.dtype == averages.dtype:
            self.write(averages, factor)
        else:
            self.write(sums, factor)
            kernels.unpack(sums, [averages])


class BaseCodec(RankSum):
    """Form in which a part of a bucket's accumulated gradients is sent."""

    def begin(self, step: int | torch.Tensor) -> None:
        """Prepare for the step of that number (see :class:`Scaling`)."""

    def accumulate(self, summands: Summands) -> torch.Tensor:
        """Run :func:`pycomm.kernels.accumulate`, and whatever the codec does in the same pass; return what it does."""
        finite: torch.Tensor = kernels.accumulate(*summands.arrays, **summands.options)
        return finite

    def send(self, accumulated: Accumulated, told: Told) -> Report:
        """Take a part out of ``accumulated``, send it with what is ``told``, and receive every rank's."""
        raise NotImplementedError

    def commit(self, finite: Flag) -> None:
        """Keep this step's state for the next one, if ``finite``."""


def on_device(device: torch.device, factor: float | torch.Tensor) -> torch.Tensor:
    """Return ``factor`` as a 0-d float32 tensor on ``device``."""
    return factor.float() if isinstance(factor, torch.Tensor) else _constant(factor, device)


@functools.lru_cache(maxsize=64)
def _constant(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def _put_back(outcome: Outcome, now: torch.Tensor, before: torch.Tensor) -> None:
    """Restore the old state: of unused parameters, and all of it if ``finite`` is a false tensor."""
    if outcome.used is not None:
        parts = zip(outcome.bucket.parts(now), outcome.bucket.parts(before), outcome.used, strict=True)
        for part, old, used in parts:
            torch.where(used, part, old, out=part)
    if isinstance(outcome.finite, torch.Tensor):
        kernels.pack([before], now, unless=outcome.finite, scratch=outcome.scratch)


def wide_dtype(bucket: Bucket) -> torch.dtype:
    """Return the dtype of sums and state: float64 for float64 gradients, otherwise float32."""
    return torch.float64 if bucket.dtype == torch.float64 else torch.float32


def seed_of(seed: int, rank: int, bucket: Bucket) -> int:
    """Return a seed for this rank and bucket that does not depend on the buckets before it."""
    text = f"{seed}/{rank}/{bucket.names[0]}".encode()
    return zlib.crc32(text) << 31 ^ zlib.adler32(text)


def sum_of_maxima(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the largest elements of ``tensors``; 0-d float64."""
    return torch.stack([torch.max(tensor) for tensor in tensors]).sum(dtype=torch.float64)
