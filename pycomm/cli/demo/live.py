"""What is on the screen while the ranks train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from pycomm.cli.demo.messages import Progress
from pycomm.cli.demo.settings import Settings

_SMOOTHING = 0.8  # of the loss and step time shown; one step's are too restless to read
_REFRESH_HZ = 4  # drawing takes time from the ranks
_LINES = 10

OnProgress = Callable[[Progress], None]


@contextlib.contextmanager
def display(settings: Settings, console: Console) -> Iterator[OnProgress]:
    """Gives what takes the progress: a bar per run on a terminal, a few lines of text elsewhere."""
    smooth = _Smooth(len(settings.methods))
    if console.is_terminal:
        with _bars(settings, console, smooth) as on_progress:
            yield on_progress
    else:
        yield _Lines(settings, console, smooth).on_progress


class _Smooth:
    """Running means of each run's loss and step time."""

    def __init__(self, num_runs: int) -> None:
        self._means: list[tuple[float, float] | None] = [None] * num_runs

    def add(self, progress: Progress) -> tuple[float, float]:
        new = (progress.loss, progress.step_seconds)
        old = self._means[progress.run] or new
        loss, seconds = (_SMOOTHING * o + (1 - _SMOOTHING) * n for o, n in zip(old, new, strict=True))
        self._means[progress.run] = (loss, seconds)
        return loss, seconds


@contextlib.contextmanager
def _bars(settings: Settings, console: Console, smooth: _Smooth) -> Iterator[OnProgress]:
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
            loss, seconds = smooth.add(progress)
            figures = f"loss {loss:5.3f}  {1e3 * seconds:5.1f} ms"
            bars.update(tasks[progress.run], completed=progress.step, figures=figures)

        yield on_progress


class _Lines:
    """A line for every tenth of the way, once all runs have come that far."""

    def __init__(self, settings: Settings, console: Console, smooth: _Smooth) -> None:
        self._settings = settings
        self._console = console
        self._smooth = smooth
        self._steps = [0] * len(settings.methods)
        self._losses = [float("nan")] * len(settings.methods)
        self._printed = 0

    def on_progress(self, progress: Progress) -> None:
        self._steps[progress.run] = progress.step
        self._losses[progress.run], _ = self._smooth.add(progress)
        tenths = _LINES * min(self._steps) // self._settings.steps
        if tenths > self._printed:
            self._printed = tenths
            losses = ", ".join(
                f"{method.label} {loss:.3f}" for method, loss in zip(self._settings.methods, self._losses, strict=True)
            )
            self._console.print(f"step {min(self._steps)} of {self._settings.steps}: loss {losses}", soft_wrap=True)
