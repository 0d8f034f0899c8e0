"""Schedules: collectives as tables, with a name and a goal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pycomm.schedule.network import Link, Network
from pycomm.schedule.simulate import simulate
from pycomm.schedule.table import Ints, Round, require_ranks

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
        critical: bytes on the critical path: the seconds it takes if a byte takes one second and nothing
            else takes time. Every rank has one sending and one receiving port. Edges use them in the order
            of the table, and start once their chunks are final at the sender.
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
            and a broadcast an all_gather, whose chunks all belong to one rank.
        turns: whether the table is symmetric: there are as many chunks as ranks, and adding 1 to every rank
            and chunk (modulo their number) gives the same edges, in the same order at every port. Saves time
            in :func:`pycomm.schedule.simulate`.
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
        steps = 0
        messages, sent, received = (np.zeros(self.num_ranks) for _ in range(3))
        for r in self.rounds():
            steps += 1
            share = r.count / self.num_chunks
            messages += np.bincount(r.src, minlength=self.num_ranks)
            sent += np.bincount(r.src, share, self.num_ranks)
            received += np.bincount(r.dst, share, self.num_ranks)
        return Stats(
            steps=steps,
            messages=int(messages.max()),
            total=float(sent.sum()),
            max_sent=float(sent.max()),
            max_received=float(received.max()),
            critical=simulate(self, 1.0, _UNIT_NETWORK),
        )

    def __repr__(self) -> str:
        return f"<schedule {self.name}: {self.goal} among {self.num_ranks} ranks, {self.num_chunks} chunks>"


def phase(
    name: str, goal: str, num_ranks: int, rounds: Callable[[int], Iterator[Round]], owners: Ints | None = None
) -> Schedule:
    """Make a reduce-scatter or an all-gather on ``num_ranks`` chunks; without ``owners`` rank r owns chunk r."""
    num_ranks = require_ranks(num_ranks)
    owners = np.arange(num_ranks, dtype=np.int64) if owners is None else owners
    return Schedule(name, num_ranks, num_ranks, lambda: rounds(num_ranks), goal, owners)
