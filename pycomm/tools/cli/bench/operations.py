"""The collectives that ``pycomm bench`` measures: how much of what goes where, and what bandwidth means for each.

Sizes, counts and the two bandwidths are those of nccl-tests. In its words: ``size`` are the bytes of the larger of the
two arrays, ``count`` the elements of one rank's part; algbw = size / time, and busbw corrects it by what has to cross
the links, so that one figure can be held against hardware for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Dtype(NamedTuple):
    """Type of elements: the name that torch has for it, and its bytes."""

    torch_name: str
    itemsize: int


DTYPES = {
    "int8": Dtype("int8", 1),
    "uint8": Dtype("uint8", 1),
    "int32": Dtype("int32", 4),
    "int64": Dtype("int64", 8),
    "half": Dtype("float16", 2),
    "float": Dtype("float32", 4),
    "double": Dtype("float64", 8),
    "bfloat16": Dtype("bfloat16", 2),
}
"""nccl-tests' names of dtypes; unsigned ones of more than 8 bits are left out, which torch cannot add."""

COMMUNICATOR = "communicator"
"""``--backend`` and ``--peers`` call :class:`pycomm.Communicator` by this name."""

REDUCTIONS = ("sum", "prod", "max", "min", "avg")
_ALIGNMENT = 16  # bytes that a rank's part is a multiple of, where it has as many


@dataclass(frozen=True)
class BenchOperation:
    """One collective.

    Attributes:
        split: whether one of its arrays consists of a part for each rank.
        reduces, rooted: whether it has a reduction, and a root.
        reads, writes: "part" or "all", the array that a rank hands in and the one it gets.
        bus: what busbw has over algbw, for P ranks: "twice" 2(P-1)/P, "once" (P-1)/P, "one" 1.
    """

    name: str
    split: bool = False
    reduces: bool = False
    rooted: bool = False
    reads: str = "all"
    writes: str = "all"
    bus: str = "one"

    def bus_factor(self, ranks: int) -> float:
        """Return busbw / algbw."""
        return {"twice": 2 * (ranks - 1) / ranks, "once": (ranks - 1) / ranks, "one": 1.0}[self.bus]

    def count_of(self, num_bytes: int, itemsize: int, ranks: int) -> int:
        """Return the elements of a part, or of the array where there are none, for a size of about ``num_bytes``."""
        count = num_bytes // itemsize // (ranks if self.split else 1)
        per_line = max(1, _ALIGNMENT // itemsize)
        if self.split and count > per_line:
            count -= count % per_line
        return 0 if self.name == "barrier" else max(1, count)


OPERATIONS = {
    operation.name: operation
    for operation in (
        BenchOperation("all_reduce", reduces=True, bus="twice"),
        BenchOperation("reduce", reduces=True, rooted=True),
        BenchOperation("broadcast", rooted=True),
        BenchOperation("all_gather", split=True, reads="part", bus="once"),
        BenchOperation("reduce_scatter", split=True, reduces=True, writes="part", bus="once"),
        BenchOperation("all_to_all", split=True, bus="once"),
        BenchOperation("gather", split=True, rooted=True, reads="part", bus="once"),
        BenchOperation("scatter", split=True, rooted=True, writes="part", bus="once"),
        BenchOperation("sendrecv"),
        BenchOperation("barrier"),
    )
}


@dataclass(frozen=True)
class Case:
    """One line of the table: an operation with all that it needs.

    Attributes:
        count: elements of a part, or of the array where the operation has no parts.
        dtype, redop: by nccl-tests' names; "none" where there is nothing to reduce.
        root: rank, -1 where there is none.
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

        found: torch.dtype = getattr(torch, DTYPES[self.dtype].torch_name)
        return found

    @property
    def elements(self) -> int:
        """Elements of the larger array."""
        return self.count * (self.ranks if self.spec.split else 1)

    @property
    def size(self) -> int:
        """Bytes of the larger array."""
        return self.elements * DTYPES[self.dtype].itemsize

    def as_json(self) -> dict[str, Any]:
        """Return what :class:`Case` takes, to hand it to another process."""
        return dict(vars(self))

    def gives(self, rank: int) -> bool:
        """Return whether ``rank`` hands anything in."""
        return self.operation not in ("broadcast", "scatter", "barrier") or rank == self.root

    def gets(self, rank: int) -> bool:
        """Return whether ``rank`` gets a result."""
        if self.operation == "barrier":
            return False
        return self.operation not in ("reduce", "gather") or rank == self.root

    def input_span(self, rank: int, in_place: bool) -> slice:
        """Return where a rank's input lies: in an array of its own or, ``in_place``, in that of the result."""
        return self._span(self.spec.reads, rank, in_place)

    def output_span(self, rank: int, in_place: bool) -> slice:
        """Return where a rank's result lies in its array."""
        return self._span(self.spec.writes, rank, in_place)

    def _span(self, what: str, rank: int, in_place: bool) -> slice:
        begin = rank * self.count if in_place and what == "part" else 0
        return slice(begin, begin + (self.count if what == "part" else self.elements))

    def least_traffic(self) -> float:
        """Return the bytes that all ranks together read and write at least, each once, in those of one copy by all.

        On one host: what several ranks read of the same array counts once. A copy reads and writes ``size`` on each.
        """
        ranks = self.ranks
        given = {"broadcast": 1, "scatter": 1, "all_gather": 1, "gather": 1}.get(self.operation, ranks)
        got = {"reduce": 1, "gather": 1, "reduce_scatter": 1, "scatter": 1}.get(self.operation, ranks)
        return (given + got) / (2 * ranks)
