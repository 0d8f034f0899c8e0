"""Messages that every rank gets from every other: a report, then arrays of a size that all ranks know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.report import GatheredReport, num_codes

_ALIGNMENT = 8  # of every array in a message: whatever dtype it has


@dataclass(frozen=True)
class Layout:
    """A byte per code (or none), then ``arrays``: dtype and number of elements of each."""

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
        """Views into ``message``."""
        begins = self._begins()
        return [
            message[begin : begin + dtype.itemsize * count].view(dtype)
            for begin, (dtype, count) in zip(begins, self.arrays, strict=False)
        ]


class Messages:
    """One message of each rank. ``mine`` is where this rank's arrays go, ``everyones[p]`` what rank p's were."""

    def __init__(self, bucket: Bucket, communicator: Communicator, arrays: Sequence[tuple[torch.dtype, int]]) -> None:
        self._communicator = communicator
        self._num_codes = num_codes(len(bucket.names))
        self._device = bucket.device
        self._room = self._no_bytes()
        self._room_for_all = self._no_bytes()
        self.arrange(arrays)

    def arrange(self, arrays: Sequence[tuple[torch.dtype, int]]) -> None:
        """Messages of these arrays from now on, in the same memory while it suffices."""
        layout = Layout(self._num_codes, tuple(arrays))
        num_bytes, size = layout.num_bytes(), self._communicator.size
        if num_bytes > len(self._room):
            # Zeros: the gaps between arrays travel too.
            self._room = self._communicator.empty(num_bytes, torch.uint8, self._device).zero_()
            self._room_for_all = torch.empty(size * num_bytes, dtype=torch.uint8, device=self._device)
        self._message, self._everyone = self._room[:num_bytes], self._room_for_all[: size * num_bytes]
        messages = list(torch.split(self._everyone, num_bytes))
        self._rows = [message[: self._num_codes] for message in messages]
        self.mine = layout.arrays_in(self._message)
        self.everyones = [layout.arrays_in(message) for message in messages]

    def _no_bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device)

    def gather(self, codes: torch.Tensor) -> GatheredReport:
        """Send ``mine``, with ``codes``, to all; afterwards ``everyones`` holds what came."""
        self._message[: self._num_codes] = codes
        self._communicator.all_gather(self._everyone, self._message)
        return GatheredReport(torch.stack(self._rows))

    @property
    def num_bytes(self) -> int:
        """That one rank's message takes."""
        return self._message.numel()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
