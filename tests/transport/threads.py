"""Ranks that are threads of one process: the smallest thing that messages can go through. For tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from pycomm import kernels
from pycomm.errors import CommError
from pycomm.schedule.program import Program, sums_of

Result = TypeVar("Result")
Messages = Sequence[tuple[int, torch.Tensor]]
"""Peers, and the tensor to send to each or receive from it."""


class ThreadsTransport:
    """One rank of a group of threads; see :func:`run_threads`."""

    name = "threads"

    def __init__(self, rank: int, size: int, links: dict[tuple[int, int], SimpleQueue[torch.Tensor]]) -> None:
        self.rank = rank
        self.size = size
        self._links = links

    def run(self, program: Program, x: Any, op: str, timeout: float) -> None:
        """All-reduce contiguous ``x`` in place, as the transports do.

        A program that reduces ``at_once`` rounds means once, too. For the others the sums, of half types in float32,
        are divided at the end.
        """
        divides_at_end = op == "mean" and not program.at_once
        if divides_at_end and x.dtype in (torch.float16, torch.bfloat16):
            wide = x.float()  # the sum may not fit the half type although the mean does
            self.run(program, wide, op, timeout)
            x.copy_(wide)
            return
        flat = x.view(-1)
        for sends, receives in program.rounds():
            self._do_round(program, flat, "sum" if divides_at_end else op, sends, receives, timeout)
        if divides_at_end:
            flat.mul_(1.0 / program.num_ranks)

    def _do_round(
        self,
        program: Program,
        flat: torch.Tensor,
        op: str,
        sends: list[list[int]],
        receives: list[list[int]],
        timeout: float,
    ) -> None:
        def part(row: list[int]) -> torch.Tensor:
            chunk, count = row[1:3]
            return flat[program.border(chunk, len(flat)) : program.border(chunk + count, len(flat))]

        outgoing = [(row[0], part(row)) for row in sends]
        owns = [part(row) for row in receives]
        # No COPY writes what its round reads, so it may arrive where it belongs.
        incoming = [(row[0], torch.empty_like(own) if row[3] else own) for row, own in zip(receives, owns, strict=True)]
        self._exchange(outgoing, incoming, timeout)
        for own, *theirs in sums_of(program.rank, receives, owns, [x for _, x in incoming]):
            if own.numel() > 0:
                kernels.reduce(own, theirs, op)

    def _exchange(self, sends: Messages, receives: Messages, timeout: float) -> None:
        """Send and receive all messages at once, and return when all is done."""
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
