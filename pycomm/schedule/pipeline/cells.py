"""Tables as text: in torch's format, and as pictures.

torch's format has comma-separated cells, a row per rank, a column per slot. A cell is an action: "1F0" is the forward
of microbatch 0 of stage 1, "1B0" its whole backward, "1I0" and "1W0" its two parts; an empty cell is idle. It is what
``torch.distributed.pipelining`` calls "compute_only": messages are not in it. Pairs of overlapping actions,
"(0F1;3B0)OVERLAP_F_B", are read as two actions, in that order.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pycomm.schedule.pipeline.table import BACKWARD, LETTERS, MOST_ACTIONS, Action, Columns, Pipeline, columns_of
from pycomm.schedule.table import Ints, require_ranks
from pycomm.schedule.verify import ScheduleError

_ACTION = re.compile("([0-9]{1,9})([FBIW])([0-9]{1,9})")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_LONGEST_CELL = 80  # characters of a cell that errors show
_MOST_CELLS = 1 << 26
_IDLE = "."


def slots(table: Any) -> tuple[Columns, Ints, int]:
    """Read a table; return it, the column of each action, and the number of columns.

    A column stands for a time; times at which no rank has an action get none.

    Raises:
        ScheduleError: ``table`` is none, a number in it is out of range, or it is too sparse to be written.
    """
    c = columns_of(table)
    times, column = np.unique(c.time, return_inverse=True)
    if len(times) * c.num_ranks > _MOST_CELLS:
        raise ScheduleError(
            f"{c.num_ranks} ranks with actions at {len(times)} times make more than {_MOST_CELLS} cells"
        )
    return c, column.astype(np.int64), len(times)


def picture(table: Any) -> str:
    """Draw a table: a row per rank, a column per time at which any rank begins an action.

    "F3" is the forward of microbatch 3, "B3" its backward; "I3" and "W3" are the gradients of its input and
    weights. The stage's number comes first if a rank has several; "." is idle. In a generated table each
    action takes one column, however long it would run.

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


def to_csv(table: Any) -> str:
    """Return ``table`` as torch reads it, with ``_load_csv(..., format="compute_only")``.

    Raises:
        ScheduleError: ``table`` is none, or a number in it is out of range.
    """
    c, columns, width = slots(table)
    rows = [[""] * width for _ in range(c.num_ranks)]
    for index, (rank, column) in enumerate(zip(c.rank.tolist(), columns.tolist(), strict=True)):
        rows[rank][column] = c.action(index).cell
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def from_csv(
    text: str,
    name: str = "csv",
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    splits_weights: bool | None = None,
) -> Pipeline:
    """Read a table in torch's format. It is not verified.

    Args:
        text: a row per rank, as :func:`to_csv` and torch write them.
        name: name of the table.
        num_stages, num_microbatches: numbers of stages and microbatches; ``None``: those in the text.
        splits_weights: whether backwards may be split; ``None``: whether one in the text is.

    Raises:
        ValueError: a cell is no action, or its stage or microbatch is out of range; a stage is on two ranks, or on
            none. The message names row and cell, from 0.
    """
    if not isinstance(text, str):
        raise ValueError(f"text is {type(text).__name__}, wanted a string")
    rows, cells = _read(text)
    columns = np.array([(cell.row, cell.time, *cell.action) for cell in cells], np.int64).T
    rank, time, stage, kind, microbatch = columns
    stages = _size(num_stages, "num_stages", stage, cells)
    microbatches = _size(num_microbatches, "num_microbatches", microbatch, cells)
    return Pipeline(
        name=str(name),
        num_ranks=rows,
        num_stages=stages,
        num_microbatches=microbatches,
        rank_of_stage=_placement(cells, stages),
        rank=rank,
        time=time,
        stage=stage,
        kind=kind,
        microbatch=microbatch,
        splits_weights=bool((kind > BACKWARD).any()) if splits_weights is None else bool(splits_weights),
    )


class _Cell(NamedTuple):
    """Action and its place: row and column of the text, from 0, and a time that is unique within the row."""

    row: int
    column: int
    time: int
    action: Action

    def __str__(self) -> str:
        return f"row {self.row}, cell {self.column} ({self.action.cell})"


def _read(text: str) -> tuple[int, list[_Cell]]:
    """Return the number of rows, and the cells."""
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ValueError(f"this is not a table of comma-separated cells: {error}") from None
    while rows and not rows[-1]:  # blank lines at the end
        rows.pop()
    found = [[list(_actions(cell, row, column)) for column, cell in enumerate(cells)] for row, cells in enumerate(rows)]
    width = max((len(cells) for cells in found), default=0)
    # A column with a pair takes as many times as its longest cell.
    lengths = [max([len(cells[column]) for cells in found if column < len(cells)] + [1]) for column in range(width)]
    times = np.cumsum([0, *lengths]).tolist()
    cells = [
        _Cell(row, column, times[column] + nth, action)
        for row, row_cells in enumerate(found)
        for column, actions in enumerate(row_cells)
        for nth, action in enumerate(actions)
    ]
    if not cells:
        raise ValueError("this table has no action")
    if len(cells) > MOST_ACTIONS:
        raise ValueError(f"this table has {len(cells)} actions, wanted at most {MOST_ACTIONS}")
    return len(rows), cells


def _actions(cell: str, row: int, column: int) -> Iterator[Action]:
    """Yield the actions of a cell: none, one, or a pair."""
    cell = cell.strip()
    pair = _PAIR.fullmatch(cell)
    for word in pair[1].split(";") if pair else [cell] * bool(cell):
        match = _ACTION.fullmatch(word.strip())
        if match is None:
            shown = cell if len(cell) <= _LONGEST_CELL else cell[:_LONGEST_CELL] + "..."
            raise ValueError(f"row {row}, cell {column} is {shown!r}, wanted an action such as 0F0, 0B0, 0I0 or 0W0")
        yield Action(int(match[1]), LETTERS.index(match[2]), int(match[3]))


def _size(given: int | None, name: str, column: Ints, cells: list[_Cell]) -> int:
    largest = int(np.argmax(column))
    if given is None:
        if column[largest] > MOST_ACTIONS:
            raise ValueError(f"{cells[largest]}: wanted numbers of at most {MOST_ACTIONS}")
        return int(column[largest]) + 1
    size = require_ranks(given, name)
    if column[largest] >= size:
        raise ValueError(f"{cells[largest]}: wanted less than {name}, {size}")
    return size


def _placement(cells: list[_Cell], num_stages: int) -> Ints:
    """Return the rank of each stage: the one that its actions are on."""
    homes: dict[int, _Cell] = {}
    for cell in cells:
        home = homes.setdefault(cell.action.stage, cell)
        if home.row != cell.row:
            raise ValueError(f"{cell}: stage {cell.action.stage} is on two ranks, see {home}")
    if len(homes) < num_stages:
        stage = next(stage for stage in range(num_stages) if stage not in homes)
        raise ValueError(f"stage {stage} of {num_stages} has no action, so no rank has it")
    return np.array([homes[stage].row for stage in range(num_stages)], np.int64)
