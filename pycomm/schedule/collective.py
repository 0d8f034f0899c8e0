"""Schedules: collectives as tables, with a name and a goal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pycomm.schedule.network import Link, Network
from pycomm.schedule.simulate import simulate
from pycomm.schedule.table import Ints, Round, Table

_BYTE_A_SECOND = Link(alpha=0, beta=1, gamma=0)
_UNIT_NETWORK = Network(name="byte-a-second", within_host=_BYTE_A_SECOND, between_hosts=_BYTE_A_SECOND)


@dataclass(frozen=True)
class Stats:
    """Costs of a schedule on any network. Bytes are multiples of the array's ``n``.

    Attributes:
        steps: number of rounds.
        messages: the most messages that one rank sends.
        total: bytes sent by all ranks together.
        max_sent: the most bytes that one rank sends. max_received: likewise.
        critical: bytes on the critical path: the time it takes if a byte takes one second and
            nothing else takes time. Every rank has one sending and one receiving port, edges take
            them in the order of the table, and start once their chunks are final at the sender.
    """

    steps: int
    messages: int
    total: float
    max_sent: float
    max_received: float
    critical: float

    def __getitem__(self, name: str) -> float:
        value: float = getattr(self, name)
        return value


@dataclass(frozen=True, eq=False)
class Schedule:
    """Collective of ``num_ranks`` ranks on ``num_chunks`` chunks of equal size (to within one element).

    Attributes:
        name: the algorithm's name, with its parameters: "ring", "torus(4,2)".
        generate: makes the rounds, in order.
        goal: "all_reduce": every rank ends with every contribution in every chunk.
            "reduce_scatter": rank ``owners[c]`` ends with every contribution in chunk c.
            "all_gather": every rank ends with what rank ``owners[c]`` started with in chunk c.
        owners: owner of each chunk; ``None`` for all_reduce. A reduction to one rank is a reduce_scatter,
            and a broadcast an all_gather, of chunks that one rank owns.
        turns: whether the table stays the same, in the same order at every port, when all ranks and
            all chunks, of which there are as many, one by one, move on by one place. Saves time in
            :func:`pycomm.schedule.simulate`.
    """

    name: str
    num_ranks: int
    num_chunks: int
    generate: Callable[[], Iterator[Round]]
    goal: str = "all_reduce"
    owners: Ints | None = None
    turns: bool = False

    def rounds(self) -> Iterator[Round]:
        """Generate the table, from its first round."""
        return self.generate()

    def stats(self) -> Stats:
        """Return the :class:`Stats`, computed once."""
        return self._stats

    @cached_property
    def _stats(self) -> Stats:
        return _stats_of(self)

    def __repr__(self) -> str:
        return f"<schedule {self.name}: {self.goal} among {self.num_ranks} ranks, {self.num_chunks} chunks>"


def _stats_of(table: Table) -> Stats:
    num_ranks = table.num_ranks
    steps = 0
    messages, sent, received = (np.zeros(num_ranks) for _ in range(3))
    for r in table.rounds():
        steps += 1
        share = r.count / table.num_chunks
        messages += np.bincount(r.src, minlength=num_ranks)
        sent += np.bincount(r.src, share, num_ranks)
        received += np.bincount(r.dst, share, num_ranks)
    return Stats(
        steps=steps,
        messages=int(messages.max()),
        total=float(sent.sum()),
        max_sent=float(sent.max()),
        max_received=float(received.max()),
        critical=simulate(table, 1.0, _UNIT_NETWORK),
    )
