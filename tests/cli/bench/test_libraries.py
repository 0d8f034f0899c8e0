"""Every collective of every library gives what it should, out of place and in place, and turns take time."""

from __future__ import annotations

import torch.distributed as dist

from pycomm.tools.cli.bench.operations import COMMUNICATOR, ITEMSIZES, OPERATIONS, REDUCING, REDUCTIONS, ROOTED, Case
from pycomm.tools.cli.bench.rank import BenchRank
from tests.on_ranks import on_ranks

ABSENT = {"gather", "scatter", "sendrecv"}  # from Communicator
PLACES = ("out_of_place", "in_place")


def cases(ranks: int, *dtypes: str, redops: tuple[str, ...] = ("sum",)) -> list[Case]:
    """Return a case of every operation, for the last rank as the root."""
    return [
        Case(name, 37 if name != "barrier" else 0, dtype, redop, ranks - 1 if name in ROOTED else -1, ranks)
        for name in OPERATIONS
        for dtype in dtypes
        for redop in (redops if name in REDUCING else ("none",))
    ]


def bench_rank(*names: str) -> BenchRank:
    rank = BenchRank(37 * 8 * dist.get_world_size())
    for name in names:
        rank.open(name)
    return rank


@on_ranks(3)
def test_results_of_all_libraries() -> None:
    rank = bench_rank("gloo", "pycomm", COMMUNICATOR)
    for case in cases(3, "float", "int64"):
        for place in PLACES:
            for _ in range(2):  # the second time with what the first has left in the arrays
                for name in ("gloo", "pycomm"):
                    assert rank.verify(name, case, place) == 0, (name, case, place)
                found = rank.verify(COMMUNICATOR, case, place)
                absent = f"pycomm.Communicator has no {case.operation}"
                assert found == (absent if case.operation in ABSENT else 0), (case, place)
                assert rank.turn("gloo", case, place) > 0
    assert rank.turn("gloo", cases(3, "float")[0], "copy") > 0
    rank.close()


@on_ranks(2)
def test_dtypes_and_reductions() -> None:
    rank = bench_rank(COMMUNICATOR, "gloo")
    for case in cases(2, *ITEMSIZES, redops=REDUCTIONS):
        found = rank.verify(COMMUNICATOR, case, "out_of_place")
        if case.operation in ABSENT:
            continue
        floats = case.dtype in ("half", "float", "double", "bfloat16")
        if case.redop == "prod" or (case.redop == "avg" and not floats):
            assert isinstance(found, str)  # its own words
        else:
            assert found == 0, case
        if case.redop == "prod":
            assert rank.verify("gloo", case, "in_place") == 0, case
    rank.close()
