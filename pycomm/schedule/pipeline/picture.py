"""Pictures of small pipelines, in plain text."""

from __future__ import annotations

from typing import Any

from pycomm.schedule.pipeline.slots import slots

_IDLE = "."


def picture(table: Any) -> str:
    """Draw who does what when: a row per rank, a column per time at which any rank begins an action.

    "F3" is the forward of microbatch 3, "B3" its backward, or "I3" and "W3" the gradients of its input and
    weights, each after the number of its stage if a rank has several; "." is nothing. In a generated table
    each action takes one column, however long it would run.

    Raises:
        ScheduleError: ``table`` is none, or a number in it is out of range.
    """
    c, columns, width = slots(table)
    several = c.num_stages > c.num_ranks
    rows = [[f"rank {rank}", *[_IDLE] * width] for rank in range(c.num_ranks)]
    for index, (rank, column) in enumerate(zip(c.rank.tolist(), columns.tolist(), strict=True)):
        cell = c.action(index).cell
        rows[rank][1 + column] = cell if several else cell.lstrip("0123456789")
    widths = [max(len(row[column]) for row in rows) for column in range(1 + width)]
    lines = (" ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip() for row in rows)
    sizes = f"{_plural(c.num_stages, 'stage')}, {_plural(c.num_microbatches, 'microbatch')}"
    title = f"{getattr(table, 'name', 'pipeline')}: {_plural(c.num_ranks, 'rank')}, {sizes}"
    return "\n".join([title, "", *lines]) + "\n"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")
