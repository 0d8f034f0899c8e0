"""What hooks of an optimizer and a module call: the parts of a Reducer, which they so keep alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pycomm.reducer.passes import Passes
from pycomm.reducer.phases import Phases
from pycomm.reducer.progress import Progress


class ReducerHooks:
    """Object that hooks call, and hold.

    Args:
        reducer: kept alive; asked which parameters it covers.
        passes: handling of passes.
        progress: counters of steps.
        phases: account of where the time goes.
    """

    def __init__(self, reducer: Any, passes: Passes, progress: Progress, phases: Phases) -> None:
        self._reducer, self._passes, self._progress, self._phases = reducer, passes, progress, phases

    def before_forward(self) -> None:
        """Admit new parameters, and refuse wrappers that average these too."""
        self._passes.before_forward()

    def note_forward(self, output: Any) -> None:
        """Note a forward of the module in training mode."""
        self._passes.note_forward(output)

    def note_zero_grad(self) -> None:
        """Note a call of ``optimizer.zero_grad()``."""
        self._passes.note_zero_grad()

    def enter_step(self) -> bool:
        """Note that ``optimizer.step()`` begins; return whether it is no step inside another one."""
        return self._progress.enter_step()

    def begin_step(self) -> None:
        """Note that ``optimizer.step()`` is about to call its closure for the first time."""
        self._progress.stepped()

    def run_closure(self, closure: Callable[[], Any]) -> Any:
        """Return the result of ``closure``, which runs inside ``optimizer.step()``."""
        return self._progress.run_closure(closure)

    def before_step(self) -> None:
        """Raise RuntimeError if ``optimizer.step()`` would use gradients that have not been averaged."""
        self._passes.require_averaged()

    def after_step(self) -> None:
        """Note that ``optimizer.step()`` has returned."""
        self._phases.end_step()
        self._passes.stepped()

    def covers(self, param: torch.Tensor) -> bool:
        """Return whether the gradient of ``param`` is averaged, or left alone as ``ignore`` says."""
        covers: bool = self._reducer.covers(param)
        return covers
