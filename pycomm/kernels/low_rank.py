"""Matrices as products of two with few columns. Contract: csrc/kernels/low_rank.h."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pycomm._native as _native
from pycomm.checks import instance
from pycomm.kernels.accumulate import Decay, Momentum, arguments_of
from pycomm.kernels.arrays import Scratch, empty, num_threads


@dataclass(frozen=True)
class LowRank:
    """Shapes of matrices M ~ P Q^T, where P has ``rank`` columns, or as many as M has rows or columns.

    All M lie one after the other in a flat array, and so do all P and all Q.

    Attributes:
        shapes: rows and columns of each M.
        rank: at least 1.
    """

    shapes: Sequence[tuple[int, int]]
    rank: int

    @property
    def p_shapes(self) -> list[tuple[int, int]]:
        """Shape of each P."""
        return [(rows, min(self.rank, rows, columns)) for rows, columns in self.shapes]

    @property
    def q_shapes(self) -> list[tuple[int, int]]:
        """Shape of each Q."""
        return [(columns, min(self.rank, rows, columns)) for rows, columns in self.shapes]

    @property
    def num_p(self) -> int:
        """Number of elements of all P."""
        return sum(map(math.prod, self.p_shapes))

    @property
    def num_q(self) -> int:
        """Number of elements of all Q."""
        return sum(map(math.prod, self.q_shapes))


def accumulate_low_rank(
    acc: Any,
    residual: Any | None,
    grads: Sequence[Any],
    scale: Any,
    config: LowRank,
    q: Any,
    p: Any,
    *,
    clip: float | None = None,
    momentum: Momentum | None = None,
    decay: Decay | None = None,
) -> Any:
    """Do what :func:`accumulate` does, and write P = M Q to ``p``, in one pass; M is what ``acc`` receives.

    For arrays on the CPU, as the other functions here but :func:`orthogonalize`: on a GPU, matrix products of torch
    are faster.

    Args:
        acc, residual, grads, scale, clip, momentum, decay: as for :func:`accumulate`; ``grads`` are the matrices.
        config: see :class:`LowRank`.
        q, p: flat arrays of ``acc``'s dtype: all Q and all P.

    Returns:
        As :func:`accumulate`.

    Raises:
        TypeError, ValueError: dtypes, sizes or shapes do not match; an array is on a GPU.
    """
    instance("config", config, LowRank)
    finite = empty(acc, (len(grads),), "bool")
    common = arguments_of(clip, acc, residual, momentum, decay, finite, scale)
    _native.accumulate_low_rank(
        grads, common, shapes=config.shapes, rank=config.rank, q=q, p=p, num_threads=num_threads()
    )
    return finite


def split_low_rank(m: Any, config: LowRank, p: Any, q: Any) -> None:
    """Write Q = M^T P to ``q``, and subtract P Q^T from ``m``: flat arrays of float32 or float64.

    Raises:
        TypeError, ValueError: as :func:`accumulate_low_rank`.
    """
    instance("config", config, LowRank)
    _native.split_low_rank(m, config.shapes, config.rank, p, q, num_threads())


def orthogonalize(p: Any, config: LowRank, *, scratch: Scratch | None = None) -> None:
    """Make the columns of each P orthonormal, in place, by the Gram-Schmidt process in float64; also on a GPU.

    Raises:
        TypeError, ValueError: as :func:`accumulate_low_rank`.
    """
    instance("config", config, LowRank)
    _native.orthogonalize(p, config.shapes, config.rank, scratch, num_threads())


def expand_low_rank(out: Any, config: LowRank, p: Any, q: Any, scale: Any = 1.0) -> None:
    """Write P Q^T times ``scale``, a number or one float32, to ``out``: a flat array of float32 or float64.

    Raises:
        TypeError, ValueError: as :func:`accumulate_low_rank`.
    """
    instance("config", config, LowRank)
    _native.expand_low_rank(out, config.shapes, config.rank, p, q, scale, num_threads())
