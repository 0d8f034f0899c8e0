"""Binary blocks: the ranks in groups of 2^m, one for every binary digit of P.

P = 600 is blocks of 512, 64, 16 and 8. Each block reduce-scatters within itself by halving. Then, from
the smallest block up, every rank sends the parts of its piece to their owners in the next larger block.
The largest block ends with the sums. They go back down the same way while every block all-gathers by
doubling.

Steps: 2 floor(lg P) + 1 (a rank's messages of one round count as one step). Bytes: exactly 2(P - 1)n over
all ranks; no rank sends more than 2n. Bytes on the critical path, with the best order at every port: 2n
if there are few blocks, up to 4n at P = 2^m - 1, where every block waits for the next smaller one. The
table's order takes up to 3n at 2^m + 1, where a single rank sends to a whole block, message after
message. circulant.py has neither weakness.

Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; Thakur et al. 2005, section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pycomm.schedule.algorithms.folding import core_size
from pycomm.schedule.algorithms.halving_doubling import doubling, halving, piece_begin
from pycomm.schedule.collective import Schedule
from pycomm.schedule.table import COPY, REDUCE, Round, delayed, embed, require_ranks, together


def blocks_of(num_ranks: int) -> list[tuple[int, int]]:
    """Return the (first rank, size) of each block, the largest first."""
    blocks, first = [], 0
    while first < num_ranks:
        size = core_size(num_ranks - first)
        blocks.append((first, size))
        first += size
    return blocks


def binary_blocks(num_ranks: int) -> Schedule:
    """Make an all-reduce by binary blocks.

    Raises:
        ValueError: ``num_ranks`` < 1.
    """
    num_ranks = require_ranks(num_ranks)
    return Schedule("binary_blocks", num_ranks, core_size(num_ranks), lambda: _generate(num_ranks))


def _generate(num_ranks: int) -> Iterator[Round]:
    blocks = blocks_of(num_ranks)
    chunks = blocks[0][1]
    up, down, gathers = [], [], []
    for number, (first, size) in enumerate(blocks):
        members = first + np.arange(size)[None, :]
        rounds = embed(halving(size), members, 0, chunks // size)
        if number > 0:
            # Rounds 0 ... lg size - 1 reduce within the larger block; then it receives from the smaller one.
            larger = blocks[number - 1]
            up.append(delayed(_between(larger, (first, size), chunks, REDUCE), larger[1].bit_length() - 1))
            down.append(delayed(_between(larger, (first, size), chunks, COPY), number - 1))
        up.append(rounds)
        # A block has its sums one round after the next larger one.
        gathers.append(delayed(embed(doubling(size), members, 0, chunks // size), number))
    yield from together(*up)
    # Messages that smaller blocks wait for go first, then those within a block.
    yield from together(*down, *gathers)


def _between(larger: tuple[int, int], smaller: tuple[int, int], chunks: int, op: int) -> Iterator[Round]:
    """Generate the round in which owners in one block send to those in the other: REDUCE up, COPY down."""
    first, size = larger
    width = chunks // size
    begin = piece_begin(size, size) * width
    owner = np.argsort(piece_begin(smaller[1], smaller[1]))[begin // (chunks // smaller[1])] + smaller[0]
    order = np.lexsort((begin, owner))  # rank by rank of the smaller block, its piece from the front
    inside, outside, begin = (first + np.arange(size))[order], owner[order], begin[order]
    if op == REDUCE:
        yield Round.of(outside, inside, begin, width, op)
    else:
        yield Round.of(inside, outside, begin, width, op)
