"""Test data that differs between ranks and between neighbouring elements, and has exactly known results.

Element i of rank r is (7919 i + 1000003 r) mod M. M is a power of two, so small that all sums over the ranks are exact
in the dtype. Any M consecutive elements differ, and so do the same elements of any M ranks. For products, elements are
1 or 2 by the same rule.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from pycomm.tools.cli.bench.operations import Case

Indices = npt.NDArray[np.uint32]

_CHUNK = 1 << 16
_SIGNIFICANT_BITS = {"half": 11, "bfloat16": 8, "float": 24, "double": 24, "int8": 7, "uint8": 8}
_BITS = 24  # for all others: more would test no more


def modulus(ranks: int, bits: int = _BITS) -> int:
    """Return M: the largest power of two whose sum over the ranks has at most ``bits`` bits, at least 2."""
    return 1 << max(1, bits - (ranks - 1).bit_length())


def pattern(rank: int | Indices, index: Indices, modulus: int) -> Indices:
    """Return elements ``index`` of ``rank`` as integers; ``rank`` may be an array with a rank for each element."""
    offset = np.atleast_1d(np.asarray(rank, np.uint32)) * np.uint32(1000003)
    # Overflow wraps around at 2^32, a multiple of the modulus.
    return (index * np.uint32(7919) + offset) & np.uint32(modulus - 1)


def chunks(num_elements: int, begin: int = 0) -> Iterator[tuple[slice, Indices]]:
    """Yield slices of all elements with their indices, counted from ``begin``. This bounds temporary memory."""
    for start in range(0, num_elements, _CHUNK):
        piece = slice(start, min(start + _CHUNK, num_elements))
        yield piece, np.arange(begin + piece.start, begin + piece.stop, dtype=np.uint32)


def fill(case: Case, rank: int, target: torch.Tensor) -> None:
    """Write the input of ``rank`` to ``target``."""
    for piece, index in chunks(target.numel()):
        target[piece] = _given(case, rank, index)


def count_wrong(case: Case, rank: int, got: torch.Tensor) -> int:
    """Return the number of wrong elements in the result ``got`` of ``rank``."""
    tolerance, wrong = _tolerance(case), 0
    for piece, index in chunks(got.numel()):
        found, wanted = got[piece].cpu(), _wanted(case, rank, index)
        same = found == wanted if tolerance == 0.0 else torch.isclose(found, wanted, rtol=tolerance, atol=0.0)
        wrong += int((~same).sum())
    return wrong


def _given(case: Case, rank: int | Indices, index: Indices) -> torch.Tensor:
    return torch.from_numpy(_integers(case, rank, index)).to(case.torch_dtype)


def _integers(case: Case, rank: int | Indices, index: Indices) -> npt.NDArray[np.int64]:
    if case.redop == "prod":
        return 1 + ((pattern(rank, index, 1 << _BITS) >> np.uint32(7)) & np.uint32(1)).astype(np.int64)
    return pattern(rank, index, modulus(case.ranks, _SIGNIFICANT_BITS.get(case.dtype, _BITS))).astype(np.int64)


def _wanted(case: Case, rank: int, index: Indices) -> torch.Tensor:
    """Return elements ``index`` of the right result of ``rank``."""
    own_part = np.uint32(rank * case.count)
    if case.spec.reduces:
        return _reduced(case, index + own_part if case.spec.writes == "part" else index)
    if case.operation in ("all_gather", "gather", "all_to_all"):
        source, within = index // np.uint32(case.count), index % np.uint32(case.count)
        return _given(case, source, within + own_part if case.operation == "all_to_all" else within)
    if case.operation == "scatter":
        return _given(case, case.root, index + own_part)
    return _given(case, case.root if case.operation == "broadcast" else (rank - 1) % case.ranks, index)


def _reduced(case: Case, index: Indices) -> torch.Tensor:
    """Return elements ``index`` of the reduction; integers wrap around as in the dtype."""
    by_rank = [_integers(case, rank, index) for rank in range(case.ranks)]
    reduce = {"sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[case.redop]
    reduced = torch.from_numpy(functools.reduce(reduce, by_rank))
    return (reduced.double() / case.ranks if case.redop == "avg" else reduced).to(case.torch_dtype)


def _tolerance(case: Case) -> float:
    """Return the relative error allowed in an average: each rank's term and the sum may be rounded once."""
    exact = case.redop != "avg" or case.ranks & (case.ranks - 1) == 0
    return 0.0 if exact else 2 * torch.finfo(case.torch_dtype).eps
