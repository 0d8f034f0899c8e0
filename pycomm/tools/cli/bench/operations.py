"""The collectives that ``pycomm bench`` measures: the data that each moves, and its bandwidths.

Sizes, counts and bandwidths are defined as in nccl-tests: ``size`` is the bytes of the larger of the two arrays,
``count`` the elements of one rank's part, and algbw = size / time. busbw multiplies algbw by the share that has to
cross the links, so that it can be compared with the hardware for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ITEMSIZES = {"int8": 1, "uint8": 1, "int32": 4, "int64": 8, "half": 2, "float": 4, "double": 8, "bfloat16": 2}
"""Bytes of an element by nccl-tests' and torch's names, without unsigned ones of more than 8 bits: torch cannot add
these."""

COMMUNICATOR = "communicator"
"""Name of :class:`pycomm.Communicator` for ``--backend`` and ``--peers``."""

REDUCTIONS = ("sum", "prod", "max", "min", "avg")
_ALIGNMENT = 16  # bytes; larger parts are multiples of it


@dataclass(frozen=True)
class BenchOperation:
    """One collective.

    Attributes:
        split: whether one of its arrays consists of a part for each rank.
        reduces, rooted: whether it has a reduction, and a root.
        reads, writes: whether a rank's input and its result are a "part" or "all".
    """

    name: str
    split: bool = False
    reduces: bool = False
    rooted: bool = False
    reads: str = "all"
    writes: str = "all"

    def bus_factor(self, ranks: int) -> float:
        """Return busbw / algbw."""
        if self.name == "all_reduce":
            return 2 * (ranks - 1) / ranks
        return (ranks - 1) / ranks if self.split else 1.0

    def count_of(self, num_bytes: int, itemsize: int, ranks: int) -> int:
        """Return the elements of a part (of the array, if there are no parts) for a size of about ``num_bytes``."""
        count = num_bytes // itemsize // (ranks if self.split else 1)
        per_line = max(1, _ALIGNMENT // itemsize)
        if self.split and count > per_line:
            count -= count % per_line
        return 0 if self.name == "barrier" else max(1, count)


OPERATIONS = {
    operation.name: operation
    for operation in (
        BenchOperation("all_reduce", reduces=True),
        BenchOperation("reduce", reduces=True, rooted=True),
        BenchOperation("broadcast", rooted=True),
        BenchOperation("all_gather", split=True, reads="part"),
        BenchOperation("reduce_scatter", split=True, reduces=True, writes="part"),
        BenchOperation("all_to_all", split=True),
        BenchOperation("gather", split=True, rooted=True, reads="part"),
        BenchOperation("scatter", split=True, rooted=True, writes="part"),
        BenchOperation("sendrecv"),
        BenchOperation("barrier"),
    )
}


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
    def spec(self) -> BenchOperation:
        return OPERATIONS[self.operation]

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch  # not above: the parser reads the names alone

        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def elements(self) -> int:
        """Elements of the larger array."""
        return self.count * (self.ranks if self.spec.split else 1)

    @property
    def size(self) -> int:
        """Bytes of the larger array."""
        return self.elements * ITEMSIZES[self.dtype]

    def gives(self, rank: int) -> bool:
        """Return whether ``rank`` has an input."""
        return self.operation not in ("broadcast", "scatter", "barrier") or rank == self.root

    def gets(self, rank: int) -> bool:
        """Return whether ``rank`` has a result."""
        return self.operation not in ("reduce", "gather", "barrier") or rank == self.root

    def input_span(self, rank: int, in_place: bool) -> slice:
        """Return where a rank's input lies in its array; ``in_place``: in that of the result."""
        return self._span(self.spec.reads, rank, in_place)

    def output_span(self, rank: int, in_place: bool) -> slice:
        """Return where a rank's result lies in its array."""
        return self._span(self.spec.writes, rank, in_place)

    def _span(self, what: str, rank: int, in_place: bool) -> slice:
        begin = rank * self.count if in_place and what == "part" else 0
        return slice(begin, begin + (self.count if what == "part" else self.elements))

    def least_traffic(self) -> float:
        """Return the least memory traffic of all ranks, as a multiple of a copy of ``size`` bytes on every rank.

        This is for one host: an array that several ranks read counts once.
        """
        given = 1 if self.operation in ("broadcast", "scatter", "all_gather", "gather") else self.ranks
        got = 1 if self.operation in ("reduce", "gather", "reduce_scatter", "scatter") else self.ranks
        return (given + got) / (2 * self.ranks)
