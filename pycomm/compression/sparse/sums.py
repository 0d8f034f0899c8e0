"""Sparse sums: over the ranks, of the entries that each has selected. choice.py says which is taken.

Here: every rank gathers all entries, k of each of P ranks; or there are so many that a dense sum is
less. balanced.py has the third way.
"""

from __future__ import annotations

from typing import Protocol

import torch

from pycomm import kernels
from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.base import Flag
from pycomm.compression.codec import wide_dtype
from pycomm.compression.half_scale import agreed_scale
from pycomm.compression.messages import GatheredMessages, SummedMessage
from pycomm.compression.report import Report


class SparseSum(Protocol):
    """Sum over the ranks of selected entries of one bucket, as many of every rank in every step."""

    bytes_sent: int

    def reduce(self, flat: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, codes: torch.Tensor) -> Report:
        """Sum what all ranks selected, and leave in ``flat``, which ``values`` were taken from, what was not sent."""

    def sent(self) -> torch.Tensor:
        """Return the indices into ``flat`` of the entries that this rank sent: int64."""

    def largest(self) -> torch.Tensor:
        """Return a bound on the magnitudes of the sums; 0-d float64."""

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        """Write the sums times ``factor`` to ``out``."""

    def commit(self, finite: Flag) -> None:
        """Keep what this step says about the next, if ``finite``."""


class Entries:
    """Form of ``count`` values and their ascending indices, all below ``limit``, in a message.

    Half values are scaled by a power of two that brings the largest to the top of float16.

    Attributes:
        arrays: dtype and number of elements of each array in the message.
    """

    def __init__(self, dtype: torch.dtype, limit: int, count: int, half: bool) -> None:
        self._half = half and dtype == torch.float32
        self._limit, self.count = limit, count
        value = (torch.float16, count) if self._half else (dtype, count)
        self.arrays = [value, (torch.int32, kernels.packed_words(limit, count))]
        if self._half:
            self.arrays.insert(0, (torch.float32, 1))
        self._scratch = kernels.Scratch()

    def num_bytes(self) -> int:
        """Return the size of all arrays."""
        return sum(dtype.itemsize * count for dtype, count in self.arrays)

    def put(self, values: torch.Tensor, indices: torch.Tensor, arrays: list[torch.Tensor]) -> torch.Tensor:
        """Write ``values`` and ``indices`` to a message's arrays; return the rounding errors of ``values``."""
        *scale, sent, words = arrays
        kernels.pack_indices(indices, self._limit, words)
        if not scale:
            sent.copy_(values)
            return torch.zeros_like(values)
        scale[0].copy_(agreed_scale(values.abs().max(), 1))
        sent.copy_(values * scale[0])
        return values - sent.float() / scale[0]

    def get(self, arrays: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values, without their scale, and the indices of a message."""
        *scale, sent, words = arrays
        indices = kernels.unpack_indices(words, self._limit, self.count, scratch=self._scratch)
        return (sent.float() / scale[0] if scale else sent), indices


class GatheredSum:
    """Sum that every rank makes itself, of the gathered entries of all."""

    def __init__(self, bucket: Bucket, communicator: Communicator, count: int, half: bool) -> None:
        self.bytes_sent = 0
        self._entries = Entries(wide_dtype(bucket), bucket.num_elements, count, half)
        self._messages = GatheredMessages(bucket, communicator, self._entries.arrays)
        self._received: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sent = torch.empty(0, dtype=torch.int64)
        self._scratch = kernels.Scratch()

    def reduce(self, flat: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, codes: torch.Tensor) -> Report:
        self._sent = indices.long()
        flat[self._sent] = self._entries.put(values, indices, self._messages.mine)
        self.bytes_sent += self._messages.num_bytes
        report = self._messages.gather(codes)
        self._received = [self._entries.get(arrays) for arrays in self._messages.everyones]
        return report

    def sent(self) -> torch.Tensor:
        return self._sent

    def commit(self, finite: Flag) -> None:
        pass

    def largest(self) -> torch.Tensor:
        return torch.stack([values.abs().max() for values, _ in self._received]).double().sum()

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        out.zero_()
        for values, indices in self._received:
            kernels.scatter_add(out, indices, values, factor, scratch=self._scratch)


class DenseSum:
    """Sum of dense arrays that hold the entries among zeros."""

    def __init__(self, bucket: Bucket, communicator: Communicator, count: int, half: bool) -> None:
        self.bytes_sent = 0
        self._message = SummedMessage(bucket, communicator, bucket.num_elements)
        self._sent = torch.empty(0, dtype=torch.int64)

    def reduce(self, flat: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, codes: torch.Tensor) -> Report:
        self._sent = indices.long()
        self._message.values.zero_()
        self._message.values[self._sent] = values
        flat.index_fill_(0, self._sent, 0.0)
        self.bytes_sent += self._message.num_bytes
        return self._message.all_reduce(codes)

    def sent(self) -> torch.Tensor:
        return self._sent

    def commit(self, finite: Flag) -> None:
        pass

    def largest(self) -> torch.Tensor:
        return self._message.largest()

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        torch.mul(self._message.values, factor, out=out)
