"""Execution of a program by messages, over anything that can send and receive."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from pycomm import kernels
from pycomm.collectives.transport.base import Message

if TYPE_CHECKING:
    from pycomm.schedule.program import Program

HALVES = (torch.float16, torch.bfloat16)

T = TypeVar("T")


class Messenger(Protocol):
    """Messages between this rank and its peers."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], timeout: float) -> None:
        """Send and receive all messages at once, and return when all is done.

        Messages between the same two ranks arrive in the order of the lists.
        """


def run_program(program: Program, x: torch.Tensor, op: str, messenger: Messenger, timeout: float) -> None:
    """All-reduce contiguous ``x`` in place.

    A program that reduces ``at_once`` rounds means once, too. For the others the sums, of half types in float32, are
    divided at the end.
    """
    divides_at_end = op == "mean" and not program.at_once
    if divides_at_end and x.dtype in HALVES:
        wide = x.float()  # the sum may not fit the half type although the mean does
        run_program(program, wide, op, messenger, timeout)
        x.copy_(wide)
        return
    flat = x.view(-1)
    for sends, receives in rounds_of(program):
        _do_round(program, flat, "sum" if divides_at_end else op, sends, receives, messenger, timeout)
    if divides_at_end:
        flat.mul_(1.0 / program.num_ranks)


def rounds_of(program: Program) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Iterate over the rounds in which this rank has any messages: its sends and its receives."""
    rows: list[dict[int, list[list[int]]]] = []
    for numbers, table in ((program.send_rounds, program.sends), (program.receive_rounds, program.receives)):
        numbered = zip(numbers.tolist(), table.tolist(), strict=True)
        rows.append(
            {number: [row for _, row in group] for number, group in groupby(numbered, key=lambda pair: pair[0])}
        )
    for number in sorted({*rows[0], *rows[1]}):
        yield rows[0].get(number, []), rows[1].get(number, [])


def _do_round(
    program: Program,
    flat: torch.Tensor,
    op: str,
    sends: list[list[int]],
    receives: list[list[int]],
    messenger: Messenger,
    timeout: float,
) -> None:
    def part(row: list[int]) -> torch.Tensor:
        chunk, count = row[1:3]
        return flat[program.border(chunk, num_elements) : program.border(chunk + count, num_elements)]

    num_elements = flat.numel()  # not len(): it is a function of Python's
    outgoing = [(row[0], part(row)) for row in sends]
    owns = [part(row) for row in receives]
    # No COPY writes what its round reads, so it may arrive where it belongs.
    incoming = [(row[0], torch.empty_like(own) if row[3] else own) for row, own in zip(receives, owns, strict=True)]
    messenger.exchange(
        [message for message in outgoing if message[1].numel() > 0],
        [message for message in incoming if message[1].numel() > 0],
        timeout,
    )
    for own, *theirs in sums_of(program.rank, receives, owns, [x for _, x in incoming]):
        if own.numel() > 0:
            kernels.reduce(own, theirs, op)


def sums_of(rank: int, receives: list[list[int]], owns: Sequence[T], incoming: Sequence[T]) -> list[list[T]]:
    """Return, for each chunk that a round reduces, where the result goes, and what it is reduced from.

    All that comes for a chunk is reduced at once, so that sums of half types are rounded once. It is in the order of
    the ranks: partners that exchange sums get the same bits, also of zeros and NaNs.
    """
    terms: dict[tuple[int, int], list[tuple[int, T]]] = {}
    for row, own, theirs in zip(receives, owns, incoming, strict=True):
        if row[3]:
            terms.setdefault((row[1], row[2]), [(rank, own)]).append((row[0], theirs))
    by_rank = operator.itemgetter(0)
    return [[each[0][1], *(x for _, x in sorted(each, key=by_rank))] for each in terms.values()]
