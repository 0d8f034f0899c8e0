"""What is communicated can be told apart, and wrong results are noticed: every element, in every dtype."""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from pycomm.tools.cli.bench.operations import ITEMSIZES, OPERATIONS, REDUCTIONS, Case
from pycomm.tools.cli.bench.rank import chunks, count_wrong, fill, modulus, pattern

RANKS = 3


def case_of(operation: str, dtype: str = "float", redop: str = "sum", ranks: int = RANKS, count: int = 40) -> Case:
    spec = OPERATIONS[operation]
    return Case(operation, count, dtype, redop if spec.reduces else "none", 1 if spec.rooted else -1, ranks)


def inputs(case: Case) -> list[torch.Tensor]:
    """Return what every rank hands in."""
    given = []
    for rank in range(case.ranks):
        span = case.input_span(rank, in_place=False)
        given.append(torch.zeros(span.stop - span.start, dtype=case.torch_dtype))
        fill(case, rank, given[-1])
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
    reduced = functools.reduce(reducer(case.redop), given)
    if case.redop == "avg":
        reduced = reduced / ranks
    return list(reduced.chunk(ranks)) if case.operation == "reduce_scatter" else [reduced] * ranks


def reducer(redop: str) -> Any:
    return {"sum": torch.add, "avg": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}[redop]


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "barrier"])
@pytest.mark.parametrize("dtype", ITEMSIZES)
def test_right_results_are_right_and_each_wrong_element_is_counted(operation: str, dtype: str) -> None:
    case = case_of(operation, dtype)
    for rank, result in enumerate(results(case)):
        if not case.gets(rank):
            continue
        assert count_wrong(case, rank, result) == 0
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
    missing = inputs(case)[0] if redop != "prod" else torch.ones(1000, dtype=case.torch_dtype)
    assert count_wrong(case, 0, missing) > 50  # a rank that got only its own
    assert count_wrong(case, 0, torch.full_like(result, math.nan)) == 1000


def test_results_of_another_rank_are_wrong() -> None:
    for operation in ("reduce_scatter", "all_to_all", "scatter", "sendrecv"):
        case = case_of(operation)
        found = results(case)
        assert all(count_wrong(case, rank, found[rank - 1]) == len(found[rank]) for rank in range(RANKS)), operation


def test_neighbours_and_ranks_differ() -> None:
    m = modulus(64)
    numbers = [pattern(rank, np.arange(5000, dtype=np.uint32), m) for rank in range(64)]
    assert len({int(element) for element in numbers[0]}) == 5000
    assert all((one != other).all() for one, other in pairwise(numbers))
    assert int(sum(int(column.max()) for column in numbers)) < 2**24


def test_pieces_meet() -> None:
    pieces = list(chunks(150_000, begin=7))
    assert len(pieces) > 2
    assert np.concatenate([index for _, index in pieces]).tolist() == list(range(7, 150_007))
    assert [piece.start for piece, _ in pieces[1:]] == [piece.stop for piece, _ in pieces[:-1]]


def test_counts_are_those_of_nccl_tests() -> None:
    assert OPERATIONS["all_reduce"].count_of(1000, 4, 3) == 250
    assert OPERATIONS["all_gather"].count_of(1 << 20, 4, 3) == 87380  # a multiple of 16 bytes
    assert OPERATIONS["all_to_all"].count_of(4, 4, 3) == 1  # where nccl-tests has an empty line
    assert case_of("all_gather", count=87380).size == 1048560
    factors = {name: operation.bus_factor(4) for name, operation in OPERATIONS.items()}
    assert factors["all_reduce"] == 1.5
    assert {factors[name] for name in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")} == {0.75}
    assert {factors[name] for name in ("broadcast", "reduce", "sendrecv")} == {1.0}


def test_floors_count_every_byte_once() -> None:
    """In copies of the whole array by every rank, each of which reads and writes it."""
    floors = {name: case_of(name, ranks=4).least_traffic() for name in OPERATIONS}
    assert (floors["all_reduce"], floors["all_to_all"], floors["sendrecv"]) == (1.0, 1.0, 1.0)
    assert floors["all_gather"] == floors["reduce_scatter"] == floors["broadcast"] == floors["reduce"] == 5 / 8
    assert floors["gather"] == floors["scatter"] == 2 / 8
