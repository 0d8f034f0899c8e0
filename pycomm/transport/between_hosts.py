"""Messages between ranks of different hosts, one of each host: sums by a schedule, and copies along a chain."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pycomm import schedule
from pycomm.schedule.network import Link, Network
from pycomm.schedule.program import Program, program_of
from pycomm.transport.base import Message
from pycomm.transport.messages import run_program
from pycomm.transport.torch_group import TorchGroup

# What schedules are chosen by, the same on all ranks: threads that have to wake up, and a link of 1 Gbit/s.
_LINK = Link(alpha=1e-4, beta=8e-9, gamma=1e-10)
_NETWORK = Network(name="between hosts", within_host=_LINK, between_hosts=_LINK)
_CHAIN_BYTES = 1 << 20  # of a segment that a host passes on while it receives the next one


class BetweenHosts:
    """Ranks of ``group`` that act together, one of each host; this rank is one of them.

    Args:
        group: all ranks.
        ranks: those that act together, in the order of their hosts.
    """

    def __init__(self, group: TorchGroup, ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = tuple(ranks)
        self._index = self._ranks.index(group.rank)
        self._choices: list[tuple[float, str]] = []
        self._programs: dict[str, Program] = {}

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], timeout: float) -> None:
        """Send and receive messages; peers are numbered by host."""
        to, of = ([(self._ranks[host], x) for host, x in messages] for messages in (sends, receives))
        self._group.exchange(to, of, timeout)

    def all_reduce(self, x: torch.Tensor, op: str, timeout: float) -> None:
        """Reduce flat ``x`` over the hosts, in place; the same bits on all of them."""
        if len(x) > 0:
            run_program(self._program(x.nbytes), x, op, self, timeout)

    def broadcast(self, x: torch.Tensor, source: int, timeout: float) -> None:
        """Overwrite flat ``x``, bytes, with that of the host ``source``, along a chain of hosts."""
        size = len(self._ranks)
        place = (self._index - source) % size  # in the chain
        before, behind = (self._index - 1) % size, (self._index + 1) % size
        segments = torch.split(x, _CHAIN_BYTES)
        for step in range(len(segments) + size - 2):
            receives = [(before, segments[s]) for s in [step - place + 1] if place > 0 and 0 <= s < len(segments)]
            sends = [(behind, segments[s]) for s in [step - place] if place < size - 1 and 0 <= s < len(segments)]
            self._exchange_copies(sends, receives, timeout)

    def _exchange_copies(self, sends: Sequence[Message], receives: Sequence[Message], timeout: float) -> None:
        to, of = ([(self._ranks[host], x) for host, x in messages] for messages in (sends, receives))
        self._group.exchange(to, of, timeout, "broadcast")

    def _program(self, num_bytes: int) -> Program:
        if not self._choices:
            self._choices = schedule.rank_algorithms(len(self._ranks), _NETWORK).crossovers()
        name = [name for size, name in self._choices if size <= num_bytes][-1]
        if name not in self._programs:
            table = schedule.by_name(name, len(self._ranks))
            schedule.verify(table)
            self._programs[name] = program_of(table, self._index)
        return self._programs[name]
