"""Interface of codecs: how a part of a bucket's accumulated gradients is sent."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pycomm import kernels
from pycomm.bucket import Bucket
from pycomm.compression.base import Defaults, Flag, Operation, State
from pycomm.compression.report import Report


@dataclass(frozen=True)
class Accumulated:
    """Gradients added to what earlier steps left unsent; a codec sends part of them.

    Attributes:
        flat: the sums, one flat tensor for the bucket: float32 or float64. The codec takes out what it
            sends.
        velocity: velocities, which a codec may zero where it sends entries (momentum factor masking);
            or ``None``.
    """

    flat: torch.Tensor
    velocity: torch.Tensor | None


class Codec(Protocol):
    """Form in which a part of a bucket's accumulated gradients is sent. On a GPU only ``stats`` waits."""

    @property
    def bytes_sent(self) -> int: ...

    def begin(self, step: int | torch.Tensor) -> None:
        """Prepare for the step of that number (see :class:`Scaling`)."""

    def accumulate(self, acc: torch.Tensor, residual: torch.Tensor | None, *args: Any, **options: Any) -> torch.Tensor:
        """Run :func:`pycomm.kernels.accumulate`, with what can be done in the same pass."""

    def send(self, accumulated: Accumulated, codes: torch.Tensor) -> Report:
        """Take a part out of ``accumulated``, send it with ``codes``, and receive every rank's."""

    def largest(self) -> torch.Tensor:
        """Return a bound on the magnitudes that :meth:`write` would give with factor 1; 0-d float64."""

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        """Write the sum over the ranks of what they sent, times ``factor``, to flat ``out``."""

    def commit(self, finite: Flag) -> None:
        """Keep this step's state for the next one, if ``finite``."""

    def operations_among(self, size: int) -> list[Operation] | None:
        """See :meth:`pycomm.compression.base.Exchange.operations_among`."""

    def stats(self) -> dict[str, int]: ...

    def state(self) -> State: ...


class BaseCodec(Defaults):
    """Base of codecs: accumulates, and has nothing to prepare or to commit."""

    def __init__(self) -> None:
        self.bytes_sent = 0

    def begin(self, step: int | torch.Tensor) -> None:
        pass

    def accumulate(self, acc: torch.Tensor, residual: torch.Tensor | None, *args: Any, **options: Any) -> torch.Tensor:
        finite: torch.Tensor = kernels.accumulate(acc, residual, *args, **options)
        return finite

    def commit(self, finite: Flag) -> None:
        pass


def wide_dtype(bucket: Bucket) -> torch.dtype:
    """Return the dtype of sums and state: float64 for float64 gradients, else float32."""
    return torch.float64 if bucket.dtype == torch.float64 else torch.float32


def seed_of(seed: int, rank: int, bucket: Bucket) -> int:
    """Return a seed for this rank and bucket that does not depend on the buckets before it."""
    text = f"{seed}/{rank}/{bucket.names[0]}".encode()
    return zlib.crc32(text) << 31 ^ zlib.adler32(text)


def sum_of_maxima(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the largest elements of ``tensors``; 0-d float64."""
    return torch.stack([torch.max(tensor) for tensor in tensors]).double().sum()
