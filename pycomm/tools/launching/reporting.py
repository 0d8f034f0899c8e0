"""Progress of a function on ranks, sent by rank 0 and shown where the ranks were started."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pycomm import checks

_SECONDS = 0.2  # between two reports: more frequent ones only cost the ranks time
_LINES = 10
_last = float("-inf")


@dataclass(frozen=True)
class Progress:
    """Progress message of rank 0."""

    done: int
    total: int
    figures: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        figures = "".join(f"  {name} {value:.4g}" for name, value in self.figures.items())
        return f"{self.done}/{self.total}{figures}"


def progress(done: int, total: int, **figures: float | torch.Tensor) -> None:
    """Report the progress of a function that :func:`pycomm.launch` runs.

    The process that called ``launch`` shows a bar if rich is installed and there is a terminal or a notebook, else a
    line for every tenth. Only rank 0's calls have an effect. At most five calls a second, and always the final one, are
    passed on; the others take microseconds. Under torchrun, and in a process without ranks, rank 0 prints lines.

    Args:
        done: number of completed steps; 1 after the first one.
        total: number of steps, at least 1.
        figures: further numbers to show, or tensors of one element; these are read only if the call is passed on.

    Raises:
        TypeError, ValueError: an argument is not a number, or ``done`` is negative or beyond ``total``.
    """
    global _last
    total = checks.count("total", total, 1)
    done = checks.count("done", done, 0)
    if done > total:
        raise ValueError(f"done is {done}, wanted at most total, which is {total}")
    now = time.monotonic()
    if done == total or now - _last >= _SECONDS:
        _last = now
        read = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in figures.items()}
        _send(Progress(done, total, {name: checks.number(name, x) for name, x in read.items()}))


class Lines:
    """Progress as text: a line for every tenth."""

    def __init__(self) -> None:
        self._printed, self._last = 0, Progress(0, 0)

    def show(self, progress: Progress) -> None:
        last, self._last = self._last, progress
        if progress.total != last.total or progress.done < last.done or last.done == last.total:
            self._printed = 0  # a new run
        tenths = _LINES * progress.done // progress.total
        if tenths > self._printed:
            self._printed = tenths
            print(progress, flush=True)


def send_by(send: Callable[[Progress], None]) -> None:
    """Make :func:`progress` report through ``send``."""
    global _send
    _send = send


def _print_on_rank_0(progress: Progress, lines: Lines = Lines()) -> None:  # noqa: B008  # of the whole process
    if os.environ.get("RANK", "0") == "0":
        lines.show(progress)


_send = _print_on_rank_0


class Bar:
    """Progress as a bar drawn by rich."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        figures = TextColumn("{task.fields[figures]}")
        columns = (BarColumn(), MofNCompleteColumn(), figures, TimeElapsedColumn(), TimeRemainingColumn())
        self._bars = Bars(*columns, console=console, refresh_per_second=4)  # drawing takes time from the ranks
        self._task: Any = None

    def show(self, progress: Progress) -> None:
        figures = "  ".join(f"{name} {value:.4g}" for name, value in progress.figures.items())
        if self._task is None:
            self._bars.start()
            self._task = self._bars.add_task("", total=progress.total, figures=figures)
        self._bars.update(self._task, completed=progress.done, total=progress.total, figures=figures)

    def close(self) -> None:
        self._bars.stop()


@contextlib.contextmanager
def display() -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows progress, as a bar where one can be drawn, else as lines."""
    bar = _bar()
    if bar is None:
        yield Lines().show
        return
    try:
        yield bar.show
    finally:
        bar.close()


def _bar() -> Bar | None:
    if importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console

    console = Console(file=sys.stdout)
    drawn = console.is_terminal and not console.is_jupyter
    # In notebooks rich draws by ipywidgets.
    return Bar(console) if drawn or (console.is_jupyter and importlib.util.find_spec("ipywidgets")) else None
