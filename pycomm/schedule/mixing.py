"""Mixing: rounds in which each rank replaces its value by a weighted mean of its own and others' values.

A round has messages, as in a table, a weight for each message, and a weight for each rank's own value. The new value
of rank i is ``kept[i]`` times its own plus, for each message to it, the weight times the sender's value at the round's
start. In a matrix, ``w[i, j]`` is the weight of rank j's value in rank i's new one. If every column sums to 1 (what a
rank keeps and sends), the sum over the ranks is conserved. If every row does too (what it keeps and receives), values
that are equal on all ranks stay so, and the weights are doubly stochastic (Lian et al., "Can decentralized algorithms
outperform centralized algorithms?", 2017). :func:`pycomm.schedule.verify` proves this, and that every rank's value
reaches every other rank.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pycomm.schedule.table import REDUCE, Round, require_ranks

Floats = npt.NDArray[np.float64]

TOPOLOGIES = ("ring", "exponential", "random")
_DRAWINGS = 64  # far more than it takes to mix, for any number of ranks


class WeightedRound(NamedTuple):
    """Round of mixing.

    Attributes:
        messages: who sends to whom: REDUCEs of a single chunk.
        weights: [messages], factor of each received value.
        kept: [ranks], factor of each rank's own value.
    """

    messages: Round
    weights: Floats
    kept: Floats

    @classmethod
    def of(cls, src: Any, dst: Any, weights: Any, kept: Any) -> WeightedRound:
        """Make a round of columns; ``weights`` may be one number for all messages."""
        messages = Round.of(src, dst, 0, 1, REDUCE)
        column = np.broadcast_to(np.asarray(weights, np.float64), messages.num_edges)
        return cls(messages, column, np.asarray(kept, np.float64))

    def part_of(self, rank: int) -> tuple[list[int], float, list[tuple[int, float]]]:
        """Return the ranks that ``rank`` sends to, its own weight, and (rank, weight) of those it receives from."""
        outgoing, incoming = np.flatnonzero(self.messages.src == rank), np.flatnonzero(self.messages.dst == rank)
        sources, weights = self.messages.src[incoming].tolist(), self.weights[incoming].tolist()
        return self.messages.dst[outgoing].tolist(), float(self.kept[rank]), list(zip(sources, weights, strict=True))


@dataclass(frozen=True, eq=False)
class Mixing:
    """Rounds of mixing, repeated in a cycle.

    Attributes:
        name: the topology's name; for custom weights it contains their digest. Equal names mean equal rounds.
        turn: the rounds of one cycle.
        doubly_stochastic: whether rows are claimed to sum to 1, too.
        num_chunks, goal: for :func:`pycomm.schedule.verify`: arrays are mixed whole, and "mixing" is the goal.
    """

    name: str
    num_ranks: int
    turn: tuple[WeightedRound, ...]
    doubly_stochastic: bool
    num_chunks: int = 1
    goal: str = "mixing"

    def rounds(self) -> Iterator[WeightedRound]:
        """Return the rounds of one turn."""
        return iter(self.turn)

    def round_at(self, number: int) -> WeightedRound:
        """Return the round that is the ``number``-th to be run, from 0."""
        return self.turn[number % len(self.turn)]


def mixing(topology: str | Sequence[Any], num_ranks: int, seed: int = 0) -> Mixing:
    """Make rounds of mixing. Check custom weights with :func:`pycomm.schedule.verify`.

    Args:
        topology: "ring": both neighbors and the rank itself, a third each. "exponential": half from a rank that is
            1, 2, 4, ... ranks away, in turns (Assran et al., "Stochastic gradient push", 2019). "random": random
            pairs, from a cycle of 64 drawings; with an odd number of ranks one sits out. Or a matrix of weights, or
            several that are used in turns.
        num_ranks: number of ranks.
        seed: of "random".

    Raises:
        TypeError: ``topology`` is neither a name nor numbers.
        ValueError: there is no such name; a matrix is not ``num_ranks`` by ``num_ranks``, or there is none;
            ``num_ranks`` < 1.
    """
    num_ranks = require_ranks(num_ranks)
    if not isinstance(topology, str):
        return _by_weights(topology, num_ranks)
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology is {topology!r}, wanted one of {', '.join(TOPOLOGIES)}, or weights")
    if topology == "random":
        return Mixing(f"random(seed={seed})", num_ranks, tuple(_random(num_ranks, seed)), True)
    make = {"ring": _ring, "exponential": _exponential}[topology]
    return Mixing(topology, num_ranks, tuple(make(num_ranks)), True)


def _ring(num_ranks: int) -> Iterator[WeightedRound]:
    yield _shifts(num_ranks, (1, -1)[: num_ranks - 1])


def _exponential(num_ranks: int) -> Iterator[WeightedRound]:
    for power in range(max(1, (num_ranks - 1).bit_length())):
        yield _shifts(num_ranks, (1 << power,)[: num_ranks - 1])


def _shifts(num_ranks: int, distances: Sequence[int]) -> WeightedRound:
    """Return the round in which each rank sends to those at ``distances``, and all shares are equal."""
    src = np.tile(np.arange(num_ranks), len(distances))
    share = 1 / (len(distances) + 1)
    dst = (src + np.repeat(np.array(distances, np.int64), num_ranks)) % num_ranks
    return WeightedRound.of(src, dst, share, np.full(num_ranks, share))


def _random(num_ranks: int, seed: int) -> Iterator[WeightedRound]:
    for number in range(_DRAWINGS):
        order = list(range(num_ranks))
        random.Random(f"{seed}/{number}").shuffle(order)
        paired = np.array(order[: num_ranks // 2 * 2], np.int64).reshape(-1, 2)
        kept = np.ones(num_ranks)
        kept[paired] = 0.5
        yield WeightedRound.of(paired.ravel(), paired[:, ::-1].ravel(), 0.5, kept)


def _by_weights(topology: Sequence[Any], num_ranks: int) -> Mixing:
    try:
        given = np.asarray(topology, np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"topology is neither a name nor weights: {error}") from None
    matrices = given[None] if given.ndim == 2 else given
    if matrices.ndim != 3 or matrices.shape[1:] != (num_ranks, num_ranks) or len(matrices) == 0:
        raise ValueError(f"topology has shape {list(given.shape)}, wanted weights of {num_ranks} by {num_ranks} ranks")
    digest = hashlib.blake2b(np.ascontiguousarray(matrices).tobytes(), digest_size=8).hexdigest()
    turn = tuple(_round_of(matrix) for matrix in matrices)
    return Mixing(f"weights({len(turn)} by {num_ranks} by {num_ranks}, digest {digest})", num_ranks, turn, False)


def _round_of(matrix: Floats) -> WeightedRound:
    between = matrix.copy()
    np.fill_diagonal(between, 0.0)
    dst, src = np.nonzero(between)
    return WeightedRound.of(src, dst, matrix[dst, src], np.diagonal(matrix).copy())
