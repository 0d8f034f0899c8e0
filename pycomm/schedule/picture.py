"""Pictures of small schedules, in plain text."""

from __future__ import annotations

from pycomm.schedule.collective import Schedule
from pycomm.schedule.table import REDUCE, Round

_IDLE = "."
_GAP = "   "


def picture(schedule: Schedule) -> str:
    """Draw who sends what to whom: a row per round, a column per sending rank.

    "c2 +> 1" in the column of rank 0: rank 0 sends chunk 2 to rank 1, which adds it to its own (REDUCE).
    "c0-1 -> 3": it sends chunks 0 and 1 to rank 3, which overwrites its own with them (COPY). "all" is every
    chunk, "." nothing. Several messages of one rank in one round stand below each other, in order.
    """
    title = f"{schedule.name}: {_plural(schedule.num_ranks, 'rank')}, {_plural(schedule.num_chunks, 'chunk')}"
    rows = [["round", *(f"rank {rank}" for rank in range(schedule.num_ranks))]]
    for number, r in enumerate(schedule.rounds()):
        rows += _rows_of(r, number, schedule)
    if len(rows) == 1:
        return f"{title}\n\nno rounds: nothing has to move\n"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (_GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join([title, "", *(line.rstrip() for line in lines)]) + "\n"


def _rows_of(r: Round, number: int, schedule: Schedule) -> list[list[str]]:
    """Return as many rows as the rank that sends the most has messages, at least one."""
    messages: list[list[str]] = [[] for _ in range(schedule.num_ranks)]
    for src, dst, chunk, count, op in r.edges():
        arrow = "+>" if op == REDUCE else "->"
        messages[src].append(f"{_chunks(chunk, count, schedule.num_chunks)} {arrow} {dst}")
    height = max(1, *(len(column) for column in messages))
    columns = [[str(number)], *(column or [_IDLE] for column in messages)]
    return [[column[line] if line < len(column) else "" for column in columns] for line in range(height)]


def _chunks(first: int, count: int, num_chunks: int) -> str:
    if count == num_chunks:
        return "all"
    return f"c{first}" if count == 1 else f"c{first}-{first + count - 1}"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
