"""Every collective of every library gives what it should, out of place and in place, and turns take time."""

from __future__ import annotations

import os
from unittest.mock import patch

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from pycomm.tools.cli.bench.operations import COMMUNICATOR, ITEMSIZES, OPERATIONS, REDUCTIONS, Case
from pycomm.tools.cli.bench.rank import BenchRank
from tests.on_ranks import on_ranks

ABSENT = {"reduce", "gather", "scatter", "sendrecv"}  # from Communicator


def cases(ranks: int, *dtypes: str, redops: tuple[str, ...] = ("sum",)) -> list[Case]:
    """Return a case of every operation, for the last rank as the root."""
    return [
        Case(name, 37 if name != "barrier" else 0, dtype, redop, ranks - 1 if spec.rooted else -1, ranks)
        for name, spec in OPERATIONS.items()
        for dtype in dtypes
        for redop in (redops if spec.reduces else ("none",))
    ]


def bench_rank(*names: str) -> BenchRank:
    place = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with patch.dict(os.environ, place):
        rank = BenchRank(37 * 8 * dist.get_world_size(), store=HashStore())
    for name in names:
        rank.open(name)
    return rank


@on_ranks(3, fresh=True)
def test_results_of_all_libraries() -> None:
    rank = bench_rank("gloo", "pycomm", COMMUNICATOR)
    for case in cases(3, "float", "int64"):
        for in_place in (False, True):
            for _ in range(2):  # the second time with what the first has left in the arrays
                for name in ("gloo", "pycomm"):
                    assert rank.verify(name, case, in_place) == 0, (name, case, in_place)
                found = rank.verify(COMMUNICATOR, case, in_place)
                absent = f"pycomm.Communicator has no {case.operation}"
                assert found == (absent if case.operation in ABSENT else 0), (case, in_place)
                assert rank.turn("gloo", case, in_place, 1, 2) > 0
    assert rank.turn_copy("gloo", 37, 2) > 0
    rank.close()
    assert not dist.is_initialized()


@on_ranks(2, fresh=True)
def test_dtypes_and_reductions() -> None:
    rank = bench_rank(COMMUNICATOR, "gloo")
    for case in cases(2, *ITEMSIZES, redops=REDUCTIONS):
        found = rank.verify(COMMUNICATOR, case, False)
        if case.operation in ABSENT:
            continue
        floats = case.dtype in ("half", "float", "double", "bfloat16")
        if case.redop == "prod":
            assert found == "pycomm.Communicator has no reduction 'prod'"
        elif case.redop == "avg" and not floats:
            assert isinstance(found, str)  # its own words
        else:
            assert found == 0, case
        if case.redop == "prod":
            assert rank.verify("gloo", case, True) == 0, case
    rank.close()


@on_ranks(2, fresh=True)
def test_a_wrong_rank_is_noticed() -> None:
    rank = bench_rank("gloo")
    case = cases(2, "float")[0]
    with patch.object(dist, "all_reduce", lambda *_, **__: None):
        assert rank.verify("gloo", case, False) in (36, 37)  # one element of rank 0 is zero
    rank.close()
