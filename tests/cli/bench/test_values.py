"""What is communicated can be told apart, and wrong results are noticed: every element, in every dtype."""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from pycomm.tools.cli.bench.operations import ITEMSIZES, OPERATIONS, REDUCING, REDUCTIONS, ROOTED, SPLIT, Case, count_of
from pycomm.tools.cli.bench.rank import chunks, count_wrong, fill, pattern

RANKS = 3


def case_of(operation: str, dtype: str = "float", redop: str = "sum", ranks: int = RANKS, count: int = 40) -> Case:
    root = 1 if operation in ROOTED else -1
    return Case(operation, count, dtype, redop if operation in REDUCING else "none", root, ranks)


def inputs(case: Case) -> list[torch.Tensor]:
    """Return what every rank hands in."""
    elements = case.count if case.operation in ("all_gather", "gather") else case.size // ITEMSIZES[case.dtype]
    given = [torch.zeros(elements, dtype=getattr(torch, case.dtype)) for _ in range(case.ranks)]
    for rank, tensor in enumerate(given):
        fill(case, rank, tensor)
    return given


def results(case: Case) -> list[torch.Tensor]:
    """Return what every rank gets, by the definition of the collective."""
    given, ranks, k = inputs(case), case.ranks, case.count
    joined = torch.cat(given)
    if case.operation == "all_to_all":
        return [torch.cat([part[rank * k : (rank + 1) * k] for part in given]) for rank in range(ranks)]
    if case.operation == "sendrecv":
        return [given[rank - 1] for rank in range(ranks)]
    if case.operation == "broadcast":
        return [given[case.root]] * ranks
    if case.operation == "scatter":
        return list(given[case.root].chunk(ranks))
    if case.operation in ("all_gather", "gather"):
        return [joined] * ranks
    reduce: Any = {"prod": torch.mul, "max": torch.maximum, "min": torch.minimum}.get(case.redop, torch.add)
    reduced = functools.reduce(reduce, given)
    if case.redop == "avg":
        reduced = reduced / ranks
    return list(reduced.chunk(ranks)) if case.operation == "reduce_scatter" else [reduced] * ranks


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "barrier"])
@pytest.mark.parametrize("dtype", ITEMSIZES)
def test_right_results_are_right_and_each_wrong_element_is_counted(operation: str, dtype: str) -> None:
    case = case_of(operation, dtype)
    for rank, result in enumerate(results(case)):
        assert count_wrong(case, rank, result) == 0
        if operation in ("reduce", "gather") and rank != case.root:
            continue
        for index in (0, len(result) // 2, len(result) - 1):
            spoilt = result.clone()
            spoilt[index] += 1
            assert count_wrong(case, rank, spoilt) == 1
        assert count_wrong(case, rank, result.roll(1)) > len(result) // 2


@pytest.mark.pairwise
@pytest.mark.parametrize("redop", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat16", "double"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_reductions(redop: str, dtype: str, ranks: int) -> None:
    case = case_of("all_reduce", dtype, redop, ranks, count=1000)
    result = results(case)[0]
    assert count_wrong(case, 0, result) == 0
    missing = inputs(case)[0] if redop != "prod" else torch.ones(1000, dtype=result.dtype)
    assert count_wrong(case, 0, missing) > 50  # a rank that got only its own
    assert count_wrong(case, 0, torch.full_like(result, math.nan)) == 1000


def test_results_of_another_rank_are_wrong() -> None:
    for operation in ("reduce_scatter", "all_to_all", "scatter", "sendrecv"):
        case = case_of(operation)
        found = results(case)
        assert all(count_wrong(case, rank, found[rank - 1]) == len(found[rank]) for rank in range(RANKS)), operation


def test_neighbors_and_ranks_differ() -> None:
    numbers = [pattern(rank, np.arange(5000, dtype=np.uint32), 64) for rank in range(64)]
    assert len({int(element) for element in numbers[0]}) == 5000
    assert all((one != other).all() for one, other in pairwise(numbers))
    assert int(sum(int(column.max()) for column in numbers)) < 2**24


def test_pieces_meet() -> None:
    pieces = list(chunks(150_000))
    assert len(pieces) > 2
    assert np.concatenate([index for _, index in pieces]).tolist() == list(range(150_000))
    assert [piece.start for piece, _ in pieces[1:]] == [piece.stop for piece, _ in pieces[:-1]]


def test_counts_are_those_of_nccl_tests() -> None:
    assert count_of("all_reduce", 1000, 4, 3) == 250
    assert count_of("all_gather", 1 << 20, 4, 3) == 87380  # a multiple of 16 bytes
    assert count_of("all_to_all", 4, 4, 3) == 1  # where nccl-tests has an empty line
    assert case_of("all_gather", count=87380).size == 1048560
    factors = {name: case_of(name, ranks=4).bus_factor() for name in OPERATIONS}
    assert factors["all_reduce"] == 1.5
    assert {factors[name] for name in SPLIT} == {0.75}
    assert {factors[name] for name in ("broadcast", "reduce", "sendrecv")} == {1.0}


def test_floors_count_every_byte_once() -> None:
    """In copies of the whole array by every rank, each of which reads and writes it."""
    floors = {name: case_of(name, ranks=4).least_traffic() for name in OPERATIONS}
    assert (floors["all_reduce"], floors["all_to_all"], floors["sendrecv"]) == (1.0, 1.0, 1.0)
    assert floors["all_gather"] == floors["reduce_scatter"] == floors["broadcast"] == floors["reduce"] == 5 / 8
    assert floors["gather"] == floors["scatter"] == 2 / 8
