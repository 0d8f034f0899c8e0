"""The collectives that ``pycomm bench`` measures: the data that each moves, and its bandwidths.

Sizes, counts and bandwidths are defined as in nccl-tests: ``size`` is the bytes of the larger of the two arrays,
``count`` the elements of one rank's part, and algbw = size / time. busbw multiplies algbw by the share that has to
cross the links, so that it can be compared with the hardware for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ITEMSIZES = {"int8": 1, "uint8": 1, "int32": 4, "int64": 8, "half": 2, "float": 4, "double": 8, "bfloat16": 2}
"""Bytes of an element by nccl-tests' and torch's names, without unsigned ones of more than 8 bits: torch cannot add
these."""

COMMUNICATOR = "communicator"
"""Name of :class:`pycomm.Communicator` for ``--backend`` and ``--peers``."""

REDUCTIONS = ("sum", "prod", "max", "min", "avg")
SPLIT = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Operations of which one array consists of a part for each rank."""
OPERATIONS = ("all_reduce", "reduce", "broadcast", *SPLIT, "sendrecv", "barrier")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")

_ALIGNMENT = 16  # bytes; larger parts are multiples of it
_MOST_CALLS = 20
_TURN_BYTES = 256 << 20  # a turn moves this much, with 2 to _MOST_CALLS calls


def count_of(operation: str, num_bytes: int, itemsize: int, ranks: int) -> int:
    """Return the elements of a part (of the array, if there are no parts) for a size of about ``num_bytes``."""
    count = num_bytes // itemsize // (ranks if operation in SPLIT else 1)
    per_line = max(1, _ALIGNMENT // itemsize)
    if operation in SPLIT and count > per_line:
        count -= count % per_line
    return 0 if operation == "barrier" else max(1, count)


@dataclass(frozen=True)
class Case:
    """One line of the table: an operation with its arguments.

    Attributes:
        count: elements of a part; of the array, if the operation has no parts.
        dtype, redop: by nccl-tests' names; "none" without a reduction.
        root: rank, -1 without a root.
    """

    operation: str
    count: int
    dtype: str
    redop: str
    root: int
    ranks: int

    @property
    def size(self) -> int:
        """Bytes of the larger array."""
        return self.count * (self.ranks if self.operation in SPLIT else 1) * ITEMSIZES[self.dtype]

    def calls(self) -> tuple[int, int]:
        """Return the numbers of untimed and of timed calls in a turn."""
        timed = max(2, min(_MOST_CALLS, _TURN_BYTES // max(1, self.size)))
        return max(1, timed // 4), timed

    def bus_factor(self) -> float:
        """Return busbw / algbw."""
        if self.operation == "all_reduce":
            return 2 * (self.ranks - 1) / self.ranks
        return (self.ranks - 1) / self.ranks if self.operation in SPLIT else 1.0

    def least_traffic(self) -> float:
        """Return the least memory traffic of all ranks, as a multiple of a copy of ``size`` bytes on every rank.

        This is for one host: an array that several ranks read counts once.
        """
        given = 1 if self.operation in ("broadcast", "scatter", "all_gather", "gather") else self.ranks
        got = 1 if self.operation in ("reduce", "gather", "reduce_scatter", "scatter") else self.ranks
        return (given + got) / (2 * self.ranks)


@dataclass(frozen=True)
class BenchSettings:
    """Settings of one bench, checked.

    Attributes:
        sizes: bytes, ascending, each ``factor`` times the one before.
        cases: in the order of the table.
        launched: whether a launcher has started the ranks.
        num_bytes: of the largest array.
        device: type of device of all arrays.
    """

    sizes: tuple[int, ...]
    factor: int
    cases: tuple[Case, ...]
    ranks: int
    launched: bool
    backend: str
    peers: tuple[str, ...]
    output: Path | None
    num_bytes: int
    device: str
