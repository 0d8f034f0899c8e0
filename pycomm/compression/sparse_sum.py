"""Sums over the ranks of what each has selected. Which way is taken says sparse_choice.py.

Here: everybody gathers everything, k entries of each of P ranks; or there is so much that a dense sum
is less. balanced_sum.py has the third way.
"""

from __future__ import annotations

from typing import Protocol

import torch

from pycomm import kernels
from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.base import Flag
from pycomm.compression.feedback import wide_dtype
from pycomm.compression.gathered import Messages
from pycomm.compression.half import agreed_scale
from pycomm.compression.report import Report
from pycomm.compression.summed import Addends


class SparseSum(Protocol):
    """Of one density; one bucket's."""

    bytes_sent: int

    def reduce(self, flat: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, codes: torch.Tensor) -> Report:
        """Add up what all ranks selected. ``flat``, of which ``values`` were taken, is left with what was not sent."""

    def sent(self) -> torch.Tensor:
        """Where in ``flat`` this rank's entries were that it has sent: int64."""

    def largest(self) -> torch.Tensor:
        """A bound on the magnitudes of the sums; 0-d float64."""

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        """Write the sums times ``factor`` to ``out``."""

    def commit(self, finite: Flag) -> None:
        """Remember of this step what serves the next, if ``finite``."""


class Entries:
    """How values and ascending indices below ``limit`` lie in a message.

    Half values are scaled by a power of two that brings the largest to the top of float16.
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
        return sum(dtype.itemsize * count for dtype, count in self.arrays)

    def put(self, values: torch.Tensor, indices: torch.Tensor, arrays: list[torch.Tensor]) -> torch.Tensor:
        """Write a message's arrays; returns what rounding left over of ``values``."""
        *scale, wire, words = arrays
        kernels.pack_indices(indices, self._limit, words)
        if not scale:
            wire.copy_(values)
            return torch.zeros_like(values)
        scale[0].copy_(agreed_scale(values.abs().max(), 1))
        wire.copy_(values * scale[0])
        return values - wire.float() / scale[0]

    def get(self, arrays: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The values, as they count, and indices of a message."""
        *scale, wire, words = arrays
        indices = kernels.unpack_indices(words, self._limit, self.count, scratch=self._scratch)
        return (wire.float() / scale[0] if scale else wire), indices


class GatheredSum:
    """Every rank gathers the entries of all."""

    def __init__(self, bucket: Bucket, communicator: Communicator, count: int, half: bool) -> None:
        self.bytes_sent = 0
        self._entries = Entries(wide_dtype(bucket), bucket.num_elements, count, half)
        self._messages = Messages(bucket, communicator, self._entries.arrays)
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
    """The entries among zeros, added up like any dense array."""

    def __init__(self, bucket: Bucket, communicator: Communicator, count: int, half: bool) -> None:
        self.bytes_sent = 0
        self._addends = Addends(bucket, communicator, bucket.num_elements)
        self._sent = torch.empty(0, dtype=torch.int64)

    def reduce(self, flat: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, codes: torch.Tensor) -> Report:
        self._sent = indices.long()
        self._addends.values.zero_()
        self._addends.values[self._sent] = values
        flat.index_fill_(0, self._sent, 0.0)
        self.bytes_sent += self._addends.num_bytes
        return self._addends.all_reduce(codes)

    def sent(self) -> torch.Tensor:
        return self._sent

    def commit(self, finite: Flag) -> None:
        pass

    def largest(self) -> torch.Tensor:
        largest: torch.Tensor = kernels.absmax([self._addends.values])
        return largest.double()

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        torch.mul(self._addends.values, factor, out=out)
