"""Faults: what happens to a rank, to which one, and in the middle of what."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from itertools import product

KINDS = {
    "kill": (-signal.SIGKILL,),
    "stop": (-signal.SIGKILL,),  # by the judge, when the others have ended
    "term": (3,),
    "exit": (5,),
    "os_exit": (7,),
    "raise": (1,),
    "abort": (-signal.SIGABRT, -signal.SIGSEGV),
}
"""The exit codes that a victim of each kind ends with."""

WORKLOADS = ("raw", "attach")
TRANSPORTS = ("shared_memory", "tcp")
_TABLE = tuple(product(KINDS, WORKLOADS, TRANSPORTS))
_SHORT = (
    ("kill", "raw", "shared_memory"),
    ("stop", "raw", "shared_memory"),
    ("term", "raw", "shared_memory"),
    ("exit", "raw", "shared_memory"),
    ("raise", "raw", "shared_memory"),
    ("kill", "raw", "tcp"),
    ("stop", "raw", "tcp"),
    ("exit", "attach", "tcp"),
    ("raise", "raw", "tcp"),
    ("os_exit", "attach", "shared_memory"),
    ("term", "attach", "shared_memory"),
    ("abort", "attach", "tcp"),
)


@dataclass(frozen=True)
class Fault:
    """One thing that happens to one rank of a fresh group.

    Attributes:
        number: which one of its seed's it is.
        seed: of what the ranks do.
        delay: seconds, from when all ranks are at work to when it happens.
        variant: a number that what has several forms goes by: of ``abort``, and of ``attach``.
    """

    number: int
    seed: str
    kind: str
    workload: str
    transport: str
    size: int
    victim: int
    delay: float
    variant: int

    @property
    def timeout(self) -> float:
        """Return the timeout that the ranks use: only a rank that stands still has to be found by it."""
        return 3.0 if self.kind == "stop" else 60.0

    @property
    def bound(self) -> float:
        """Seconds within which a survivor has to have ended; more is a hang.

        Ten timeouts, where one has to pass. Half of one where none has: a death is noticed by itself.
        """
        return 10 * self.timeout if self.kind == "stop" else self.timeout / 2

    def __str__(self) -> str:
        what = f"{self.kind} {self.workload} {self.transport}"
        return f"{self.number:4d}  {what:<28} victim {self.victim} of {self.size} at {self.delay:.3f} s"


def fault_of(seed: int, number: int) -> Fault:
    """Number ``number`` of ``seed``'s; as many as the table is long, from any one on, cover the table."""
    return _make(seed, number, *_TABLE[number % len(_TABLE)])


def short_faults(seed: int) -> list[Fault]:
    """A dozen that cover what there is. Their numbers are negative: the first one's is -1."""
    return [_make(seed, -1 - i, *row) for i, row in enumerate(_SHORT)]


def _make(seed: int, number: int, kind: str, workload: str, transport: str) -> Fault:
    own = f"{seed}/{number}"
    rng = random.Random(own)
    size = rng.randint(2, 4)
    # Half of them soon: what ranks do first, they do only once.
    delay = rng.uniform(0.0, 0.5) if rng.random() < 0.5 else rng.uniform(0.0, 0.05)
    return Fault(number, own, kind, workload, transport, size, rng.randrange(size), delay, rng.randrange(1000))
