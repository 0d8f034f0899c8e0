"""The collectives that ``pycomm bench`` measures: the data that each moves, and its bandwidths.

Sizes, counts and bandwidths are defined as in nccl-tests: ``size`` is the bytes of the larger of the two arrays,
``count`` the elements of one rank's part, and algbw = size / time. busbw multiplies algbw by the share that has to
cross the links, so that it can be compared with the hardware for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Dtype(NamedTuple):
    """Element type: its name in torch, and its size in bytes."""

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
"""dtypes by nccl-tests' names, without unsigned ones of more than 8 bits: torch cannot add these."""

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
        bus: busbw / algbw for P ranks: "twice" 2(P-1)/P, "once" (P-1)/P, "one" 1.
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
        """Return the elements of a part (of the array, if there are no parts) for a size of about ``num_bytes``."""
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
        """Return the constructor's arguments, for another process."""
        return dict(vars(self))

    def gives(self, rank: int) -> bool:
        """Return whether ``rank`` has an input."""
        return self.operation not in ("broadcast", "scatter", "barrier") or rank == self.root

    def gets(self, rank: int) -> bool:
        """Return whether ``rank`` has a result."""
        if self.operation == "barrier":
            return False
        return self.operation not in ("reduce", "gather") or rank == self.root

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
        ranks = self.ranks
        given = {"broadcast": 1, "scatter": 1, "all_gather": 1, "gather": 1}.get(self.operation, ranks)
        got = {"reduce": 1, "gather": 1, "reduce_scatter": 1, "scatter": 1}.get(self.operation, ranks)
        return (given + got) / (2 * ranks)
