"""Messages between two ranks of a communicator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from pycomm.channel import Channel
from pycomm.transport.gpu import gpu_of


class PointToPoint:
    """The part of :class:`pycomm.Communicator` that is no collective."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        """Internal: operations for pycomm's own parts."""

    def send(self, x: Any, dst: int, tag: int = 0) -> None:
        """Send ``x`` to rank ``dst`` (a rank of this group, not this one), which calls :meth:`recv`. Any dtype.

        In CPU memory the message is copied, and the call returns whether or not ``dst`` receives it already: so ranks
        may send and receive in any order. It is no collective; other threads may be in collectives meanwhile. What
        has been sent and not yet received takes at most ``PYCOMM_BUFFER_BYTES`` (1 GiB, or a quarter of the memory
        if that is less): where there is no more room, the call waits.

        Args:
            x: array.
            dst: rank of the receiver.
            tag: number below 2³⁰ by which the receiver asks for it; 0 on a GPU.

        Raises:
            ValueError: ``x`` alone is larger than what may be buffered.
            CommError: ``dst`` died or closed its communicator; or there was no room within the timeout, or there
                cannot be, as ``dst`` itself waits for this rank. Over shared memory the communicator can still be
                used, unlike after other errors.
        """
        gpu = gpu_of(x)
        if gpu is None:
            return self.channel.transport.send(x, dst, tag, self.channel.timeout)
        _require_no_tag(tag)
        self.channel.on_gpu(gpu, [x], lambda nccl, *when: nccl.send(x, dst, *when))

    def recv(self, x: Any, src: int | None = None, tag: int = 0) -> int | None:
        """Overwrite ``x`` with an array of equal size that rank ``src`` sends with ``tag``. Any dtype.

        Messages of one rank with one tag come in the order in which they were sent. In CPU memory, ``src=None`` takes
        the message of any rank, and the rank it came from is returned. On a GPU, ``src`` must be given, and ``None``
        is returned.

        Raises:
            ValueError: the message has another size than ``x``. It is lost.
            CommError: no message came within the timeout, or ``src`` died or closed its communicator before it sent
                one. Over shared memory the communicator can still be used, unlike after other errors.
        """
        gpu = gpu_of(x)
        if gpu is None:
            receipt = self.channel.transport.receive(x, src, tag)
            try:
                return receipt.wait(self.channel.timeout)
            finally:
                receipt.cancel()  # unless it is completed
        _require_no_tag(tag)
        if src is None:
            raise ValueError("src is None, wanted a rank: on a GPU only messages of a given rank can be received")
        self.channel.on_gpu(gpu, [x], lambda nccl, *when: nccl.recv(x, src, *when))
        return None

    @contextlib.contextmanager
    def group(self, device: torch.device | int) -> Iterator[None]:
        """Start the operations called inside, on arrays of one GPU, together when the block ends.

        Sends and receives that need each other must be in one group. If the block raises, none of them is
        executed on this rank.
        """
        index = torch.device("cuda", device).index if isinstance(device, int) else device.index
        queue = self.channel.gpu(0 if index is None else index)
        with queue.grouped(self.channel.timeout):
            yield


def _require_no_tag(tag: int) -> None:
    if tag != 0:
        raise ValueError(f"tag is {tag!r}, wanted 0: messages between GPUs have no tags")
