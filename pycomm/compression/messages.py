"""Messages of a codec: arrays of known sizes, with a report; gathered by every rank, or summed over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pycomm import kernels
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.codec import wide_dtype
from pycomm.compression.report import GatheredReport, Report, SummedReport, Told, num_codes

_ALIGNMENT = 8  # bytes, of every array in a message, whatever its dtype


@dataclass(frozen=True)
class Layout:
    """Layout of a message: a byte per code (or none), then ``arrays``, by dtype and number of elements."""

    num_codes: int
    arrays: tuple[tuple[torch.dtype, int], ...]

    def num_bytes(self) -> int:
        return self._begins()[-1]

    def _begins(self) -> list[int]:
        begins = [_aligned(self.num_codes)]
        for dtype, count in self.arrays:
            begins.append(_aligned(begins[-1] + dtype.itemsize * count))
        return begins

    def arrays_in(self, message: torch.Tensor) -> list[torch.Tensor]:
        begins = self._begins()
        return [
            message[begin : begin + dtype.itemsize * count].view(dtype)
            for begin, (dtype, count) in zip(begins, self.arrays, strict=False)
        ]


class GatheredMemory:
    """Memory for the messages of all ranks, up to ``most`` bytes each.

    On a CPU a rank's own message lies among them, which saves its copy. On a GPU it lies apart, as memory for NCCL's
    symmetric kernels must be at the same offset on all ranks. Initially all is 0: gaps between arrays are sent, too.
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, most: int) -> None:
        self.most, self._rank, self._size = most, communicator.rank, communicator.size
        empty = functools.partial(communicator.empty, dtype=torch.uint8, device=bucket.device, symmetric=True)
        self._everyones = empty(self._size * most).zero_()
        self._apart = empty(most).zero_() if bucket.on_gpu else None

    def messages(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for this rank's message of ``num_bytes``, and for all ranks' messages, in rank order."""
        everyones = self._everyones[: self._size * num_bytes]
        mine = everyones[self._rank * num_bytes :] if self._apart is None else self._apart
        return mine[:num_bytes], everyones


class GatheredMessages:
    """Messages that are gathered: every rank receives one from each.

    Attributes:
        mine: this rank's arrays, to be written.
        everyones: the arrays of every rank, after :meth:`gather`.
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, arrays: Sequence[tuple[torch.dtype, int]]) -> None:
        self._bucket, self._communicator = bucket, communicator
        self._num_codes = num_codes(len(bucket.names))
        self._has_bits = True  # in the message, whose memory may be another one's
        self._memory: GatheredMemory | None = None
        self.arrange(arrays)

    def arrange(self, arrays: Sequence[tuple[torch.dtype, int]]) -> None:
        """Switch to messages of these arrays, in the same memory while it suffices."""
        layout, self._has_bits = Layout(self._num_codes, tuple(arrays)), True
        num_bytes, size = layout.num_bytes(), self._communicator.size
        if self._memory is None or num_bytes > self._memory.most:
            self._memory = GatheredMemory(self._bucket, self._communicator, num_bytes)
        self._message, self._everyone = self._memory.messages(num_bytes)
        messages = list(torch.split(self._everyone, num_bytes))
        self._codes = self._everyone.view(size, num_bytes)[:, : self._num_codes]
        self.mine = layout.arrays_in(self._message)
        self.everyones = [layout.arrays_in(message) for message in messages]

    def rows(self, num_bytes: int) -> torch.Tensor:
        """Return the first ``num_bytes`` of the first array of every rank's message: uint8, a row for each rank."""
        begin = _aligned(self._num_codes)
        return self._everyone.view(self._communicator.size, -1)[:, begin : begin + num_bytes]

    def gather(self, told: Told) -> Report:
        """Send ``mine``, with what is ``told``, to all ranks, and receive ``everyones``."""
        told.write(self._message[: self._num_codes], had_bits=self._has_bits)
        self._has_bits = told.fingerprint is not None
        self._communicator.all_gather(self._everyone, self._message)
        return GatheredReport(self._codes)

    @property
    def num_bytes(self) -> int:
        """Size of one rank's message."""
        return self._message.numel()


class SummedMessage:
    """Message that is summed over the ranks by an all-reduce.

    Args:
        reports: whether it has a report; of several messages of a step, one suffices.

    Attributes:
        values: ``count`` elements: this rank's before :meth:`all_reduce`, the sums after it.
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, count: int, *, reports: bool = True) -> None:
        self._communicator = communicator
        num_params = len(bucket.names)
        places = SummedReport.num_places(num_params, communicator.size) if reports else 0
        self._memory = communicator.empty(count + places, wide_dtype(bucket), bucket.device, symmetric=True)
        self.values = self._memory[:count]
        self._report = SummedReport(self._memory[count:], num_params) if reports else None

    def all_reduce(self, told: Told) -> Report:
        """Sum ``values``, and the report made of what is ``told``, over the ranks, in place."""
        assert self._report is not None
        self._report.fill(told, self._communicator.rank)
        self._communicator.all_reduce(self._memory)
        return self._report

    def all_reduce_values(self) -> None:
        """Sum ``values`` over the ranks, in place, without a report."""
        assert self._report is None
        self._communicator.all_reduce(self._memory)

    def largest(self) -> torch.Tensor:
        """Return the largest magnitude in ``values``; 0-d float64."""
        largest: torch.Tensor = kernels.absmax([self.values])
        return largest.double()

    @property
    def num_bytes(self) -> int:
        """Size of the message."""
        return self._memory.nbytes


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
