"""Display of the progress while the ranks train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from pycomm.cli.demo.messages import Progress
from pycomm.cli.demo.settings import TURN_STEPS, Settings

_REFRESH_HZ = 4  # drawing takes time from the ranks
_LINES = 10

OnProgress = Callable[[Progress], None]


@contextlib.contextmanager
def display(settings: Settings, console: Console) -> Iterator[OnProgress]:
    """Show progress, as a bar per run on a terminal, as a few lines of text elsewhere; yield the function to call."""
    if console.is_terminal:
        with _bars(settings, console) as on_progress:
            yield on_progress
    else:
        yield _Lines(settings, console).on_progress


@contextlib.contextmanager
def _bars(settings: Settings, console: Console) -> Iterator[OnProgress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=console, refresh_per_second=_REFRESH_HZ, expand=True) as bars:
        waiting = "starting" + " " * 15
        tasks = [bars.add_task(method.label, total=settings.steps, figures=waiting) for method in settings.methods]

        def on_progress(progress: Progress) -> None:
            figures = f"loss {progress.loss:5.3f}  {1e3 * progress.step_seconds:5.1f} ms"
            bars.update(tasks[progress.run], completed=progress.step, figures=figures)

        yield on_progress


class _Lines:
    """Progress as text: a line for every tenth of the way, once all runs have come that far."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._steps = [0] * len(settings.methods)
        self._losses = [float("nan")] * len(settings.methods)
        self._printed = 0

    def on_progress(self, progress: Progress) -> None:
        total = self._settings.steps
        if progress.step % TURN_STEPS and progress.step < total:
            return  # only the ends of turns can be compared
        self._steps[progress.run] = progress.step
        self._losses[progress.run] = progress.loss
        tenths = _LINES * min(self._steps) // total
        if tenths > self._printed:
            self._printed = tenths
            losses = ", ".join(
                f"{method.label} {loss:.3f}" for method, loss in zip(self._settings.methods, self._losses, strict=True)
            )
            self._console.print(f"step {min(self._steps)} of {total}: loss {losses}", soft_wrap=True)
