"""Binary blocks against the golden numbers, and what the order of the table makes of them.

The golden numbers think of the way up as done before the way down begins, block by block, with the best
order on every port. The table has an order, in which a lone rank's first messages wait for a port or keep
others from one; but its ports are full duplex, so that a lone rank takes the first results while it still
sends. Its messages, one by one, are therefore more than the golden number for few ranks, fewer for many.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from pycomm import schedule
from pycomm.schedule import Link, Network, Schedule
from pycomm.schedule.algorithms.binary_blocks import blocks_of

GOLDEN = {  # ranks: blocks, steps when posted together, one by one, bytes
    3: ([2, 1], 3, 4, 2.0),
    5: ([4, 1], 5, 8, 2.0),
    6: ([4, 2], 5, 6, 2.0),
    7: ([4, 2, 1], 5, 8, 3.0),
    12: ([8, 4], 7, 8, 2.0),
    15: ([8, 4, 2, 1], 7, 12, 3.5),
    17: ([16, 1], 9, 32, 2.0),
    24: ([16, 8], 9, 10, 2.0),
    600: ([512, 64, 16, 8], 19, 34, 2.156),
    1023: ([512, 256, 128, 64, 32, 16, 8, 4, 2, 1], 19, 36, 3.992),
}
IN_TABLE_ORDER = {  # ranks: bytes, messages one after the other
    3: (2.5, 5),
    5: (2.75, 9),
    6: (2.25, 7),
    7: (3.25, 8),
    12: (2.125, 9),
    15: (3.625, 11),
    17: (2.9375, 25),
    24: (2.0625, 11),
    600: (2.158203125, 28),
    1023: (3.994140625, 29),
}
ROUND_BY_ROUND = {3: 5, 5: 11, 6: 7, 7: 9, 12: 9, 15: 13, 17: 39, 24: 11, 600: 41, 1023: 37}


def sizes_of(ranks: int) -> list[int]:
    """Return the binary digits, the largest first."""
    return [1 << bit for bit in reversed(range(ranks.bit_length())) if ranks >> bit & 1]


def best_bytes(ranks: int) -> Fraction:
    """Return the bytes up, then down: a block has its sums once it has halved and got the next smaller one's pieces."""
    sizes = sizes_of(ranks)
    up = 1 - Fraction(1, sizes[-1])
    for larger, smaller in reversed(list(itertools.pairwise(sizes))):
        up = max(1 - Fraction(1, larger), up + Fraction(1, smaller))
    return 2 * up


def messages_up_then_down(ranks: int) -> int:
    """Return the same in messages: a piece of the smaller block goes to larger / smaller ranks, one by one."""
    sizes = sizes_of(ranks)
    up = sizes[-1].bit_length() - 1
    for larger, smaller in reversed(list(itertools.pairwise(sizes))):
        up = max(larger.bit_length() - 1, up + larger // smaller)
    return 2 * up


def messages_round_by_round(s: Schedule) -> int:
    """Return the most messages of a port in each round, summed, as if barriers followed the rounds."""
    return sum(int(max(np.bincount(r.src).max(), np.bincount(r.dst).max())) for r in s.rounds())


def messages_in_table_order(s: Schedule) -> float:
    """Simulate a second for each message and none for its bytes."""
    link = Link(alpha=1, beta=0, gamma=0)
    seconds: float = schedule.simulate(s, 0, Network(name="messages", within_host=link, between_hosts=link))
    return seconds


@pytest.mark.parametrize("ranks", GOLDEN)
def test_golden_numbers(ranks: int) -> None:
    blocks, steps, one_by_one, num_bytes = GOLDEN[ranks]
    s = schedule.binary_blocks(ranks)
    stats = s.stats()
    assert [size for _, size in blocks_of(ranks)] == sizes_of(ranks) == blocks
    assert stats.steps == len(list(s.rounds())) == steps
    assert messages_up_then_down(ranks) == one_by_one
    assert float(best_bytes(ranks)) == pytest.approx(num_bytes, abs=5e-4)
    assert stats.total == 2 * (ranks - 1)
    assert max(stats.max_sent, stats.max_received) <= 2
    schedule.verify(s)


@pytest.mark.parametrize("ranks", GOLDEN)
def test_in_the_order_of_the_table(ranks: int) -> None:
    s = schedule.binary_blocks(ranks)
    num_bytes, messages = IN_TABLE_ORDER[ranks]
    assert best_bytes(ranks) <= s.stats().critical == num_bytes
    assert messages_in_table_order(s) == messages <= messages_round_by_round(s)
    assert messages_round_by_round(s) == ROUND_BY_ROUND[ranks]


def test_figures_of_the_issue() -> None:
    """A lone rank costs more; many ranks hardly notice."""
    assert schedule.binary_blocks(3).stats().critical == pytest.approx(2.5, abs=0.05)
    assert schedule.binary_blocks(17).stats().critical == pytest.approx(2.9, abs=0.05)
    assert 2.156 <= schedule.binary_blocks(600).stats().critical <= 2.19
    folding, ring = schedule.halving_doubling(600).stats(), schedule.ring(600).stats()
    assert (folding.steps, round(folding.critical, 3)) == (20, 3.996)
    assert next(schedule.halving_doubling(600).rounds()).num_edges == 88, (
        "so many ranks fold, and are idle from then on"
    )
    assert (ring.steps, round(ring.critical, 3)) == (1198, 1.997)


def test_bytes_and_steps_of_every_number_of_ranks() -> None:
    for ranks in [*range(2, 200), 255, 256, 257, 511, 513, 1000, 1024, 1025]:
        stats = schedule.binary_blocks(ranks).stats()
        blocks = sizes_of(ranks)
        assert stats.steps == 2 * int(math.log2(ranks)) + (len(blocks) > 1)
        assert stats.total == 2 * (ranks - 1), ranks
        assert max(stats.max_sent, stats.max_received) <= 2, ranks
        assert best_bytes(ranks) <= stats.critical < 4, ranks
        assert best_bytes(ranks) >= (2 if len(blocks) > 1 else 2 - Fraction(2, ranks))


def test_blocks() -> None:
    assert blocks_of(600) == [(0, 512), (512, 64), (576, 16), (592, 8)]
    for ranks in range(1, 300):
        assert [size for _, size in blocks_of(ranks)] == sizes_of(ranks)
        assert [first for first, _ in blocks_of(ranks)] == [
            sum(sizes_of(ranks)[:i]) for i in range(len(blocks_of(ranks)))
        ]
