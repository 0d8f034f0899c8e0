"""Requests to stop, which travel with the gradients of DistributedDataParallel's first bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from pycomm.bucket import FINGERPRINT_BITS
from pycomm.communicator import Communicator
from pycomm.compression.base import Exchange
from pycomm.reducer import StopRequest

_STOP = FINGERPRINT_BITS - 1
"""Number of the bit that asks to stop."""


class Part(Protocol):
    """Part of a bucket that has an exchange of its own."""

    @property
    def exchange(self) -> Exchange: ...


class Stopping:
    """Flag of one bit, by which all ranks hear of a request of any of them at the same step.

    Attributes:
        requested: the request that all ranks have heard of; see ``pycomm.Reducer.stop_requested``.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator, self._on_gpu = communicator, device.type == "cuda"
        self._none = torch.zeros(FINGERPRINT_BITS, dtype=torch.bool, device=device)
        self._mine: str | None = None
        self._sent: str | None = None
        self.requested = StopRequest()

    def request(self, reason: str) -> None:
        """Ask all ranks to stop.

        Raises:
            ValueError: on a GPU, where the host does not wait for what others tell.
        """
        if self._on_gpu:
            raise ValueError("request_stop() on a GPU requires pycomm.attach() in place of pycomm.ddp.register()")
        if self._mine is None:
            self._mine = reason

    def flags(self) -> torch.Tensor:
        """Return what this rank tells with this step."""
        self._sent = None if self.requested else self._mine
        if self._sent is None:
            return self._none
        flags = self._none.clone()
        flags[_STOP] = True
        return flags

    def hear(self, parts: Sequence[Part]) -> None:
        """Take note of what the ranks have told with the first bucket, of these ``parts``. Collective if one asks."""
        if self._on_gpu or not (self._sent is not None or bool(parts[0].exchange.differing()[_STOP])):
            return
        mine = b"" if self._sent is None else b"!" + self._sent.encode()
        reasons = self._communicator.channel.all_gather_bytes(mine)
        rank = next(rank for rank, reason in enumerate(reasons) if reason)
        self.requested = StopRequest(rank, reasons[rank][1:].decode())
