"""Ranks that are threads of one process: the smallest thing that messages can go through. For tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from pycomm.collectives.transport.base import Message
from pycomm.collectives.transport.messages import run_program
from pycomm.errors import CommError
from pycomm.schedule.program import Program

Result = TypeVar("Result")


class ThreadsTransport:
    """One rank of a group of threads; see :func:`run_threads`."""

    name = "threads"

    def __init__(self, rank: int, size: int, links: dict[tuple[int, int], SimpleQueue[torch.Tensor]]) -> None:
        self.rank = rank
        self.size = size
        self._links = links

    def run(self, program: Program, x: Any, op: str, timeout: float) -> None:
        """Run a program as :meth:`Transport.run` does, for tensors."""
        run_program(program, x, op, self, timeout)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], timeout: float) -> None:
        """See :class:`Messenger`."""
        for peer, tensor in sends:
            self._links[self.rank, peer].put(tensor.clone())
        start = time.monotonic()
        for peer, tensor in receives:
            try:
                tensor.copy_(self._links[peer, self.rank].get(timeout=max(0.0, start + timeout - time.monotonic())))
            except Empty:
                elapsed = time.monotonic() - start
                what = f"timed out waiting for rank {peer} after {elapsed:.2f} s"
                raise CommError.during("all_reduce", what, rank=self.rank, peer=peer, elapsed=elapsed) from None


def run_threads(size: int, function: Callable[[ThreadsTransport], Result]) -> list[Result]:
    """Call ``function`` on ``size`` ranks at once; their results by rank. Raises what the first of them raised."""
    links = {(src, dst): SimpleQueue[torch.Tensor]() for src in range(size) for dst in range(size) if src != dst}
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(function, ThreadsTransport(rank, size, links)) for rank in range(size)]
        return [rank.result() for rank in ranks]
