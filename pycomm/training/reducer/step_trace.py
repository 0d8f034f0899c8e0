"""Trace of one step: spans of each thread of a rank, written to a file for ``pycomm trace``.

``PYCOMM_TRACE`` names the folder, ``PYCOMM_TRACE_STEP`` the reduction, counted from 1 (10 if it is not set).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pycomm.collectives.recorder import Recorder
from pycomm.collectives.recorder.traces import DEFAULT_STEP, STEP
from pycomm.untrusted import creating

_LOG = logging.getLogger("pycomm")
_optimizers: Counter[Path] = Counter()  # attached optimizers of this process, by the folder of their files


class StepTrace:
    """Trace of the reduction ``step`` of rank ``rank``, with its passes, and the optimizer's step after it.

    Args:
        folder: folder for the file ``rank<rank>.json`` (``rank<rank>-2.json`` for a second optimizer, and so on). It is
            written after the optimizer's step, or when the next backward pass begins without one.
        step: number of the reduction, from 1.
    """

    def __init__(self, folder: Path, step: int, rank: int, size: int) -> None:
        self._folder, self._step, self._rank, self._size = folder, step, rank, size
        _optimizers[folder] += 1
        self._optimizer = _optimizers[folder]
        self._wall = time.time() - time.monotonic()
        self._spans: list[dict[str, Any]] = []
        self._reductions = 0
        self._forward_began = self._backward_began = self._step_began = 0.0  # 0: not yet
        self._outside_began, self._outside = 0.0, ""  # since the end of what came last, and its name until then
        self.done = False

    @staticmethod
    def wanted(folder: str, rank: int, size: int) -> StepTrace:
        """Return the trace of the step that the environment names.

        Raises:
            ValueError: it names none.
        """
        text = os.environ.get(STEP, str(DEFAULT_STEP))
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{STEP} is {text!r}, wanted a positive number of a step")
        return StepTrace(Path(folder), int(text), rank, size)

    @property
    def _is_on(self) -> bool:
        return not self.done and self._reductions + 1 == self._step

    def begin_forward(self) -> None:
        """Note that a forward begins; the first one before a backward pass counts."""
        self._forward_began = self._forward_began or time.monotonic()

    def begin_backward(self) -> None:
        if not self.done and self._spans and self._reductions >= self._step:
            self._write()  # the optimizer's step was skipped, as by GradScaler for non-finite gradients
        self._backward_began = time.monotonic()
        began, self._forward_began = self._forward_began, 0.0
        if not self._is_on:
            return
        if self._outside_began:
            # What the script does there (loading data, logging) is told from a forward if the module's hooks saw one.
            name = self._outside if began else "before backward"
            self._append("training", name, self._outside_began, began or self._backward_began)
        if began:
            self._append("training", "forward", began, self._backward_began)

    def end_backward(self) -> None:
        """Note that a backward pass has ended: the last one of a step, before it waits for averages."""
        self._outside_began, self._outside = time.monotonic(), "between passes"
        if self._is_on and self._backward_began:
            self._append("training", "backward", self._backward_began, self._outside_began)
        self._backward_began = 0.0  # so that flush() ends no pass

    def add(self, lane: str, name: str, began: float, ended: float) -> None:
        """Note that ``name`` was done, at these times of the monotonic clock."""
        if self._is_on:
            self._append(lane, name, began, ended)

    def add_operations(self, recorder: Recorder, label: str, since: float) -> None:
        """Note the collectives of ``recorder`` that began ``since`` then."""
        if not self._is_on:
            return
        for entry in recorder.entries():
            if entry.began >= since and entry.label == label and entry.ended is not None:
                self._append("wire", f"{entry.operation}, {label}", entry.began, entry.ended)

    def end_reduction(self) -> None:
        self._step_began = self._outside_began = time.monotonic()
        self._outside = "between steps"
        self._reductions += 1

    def begin_step(self) -> None:
        """Note that ``optimizer.step()`` begins, or goes on after its closure."""
        self._step_began = time.monotonic()
        if not self.done and self._reductions == self._step:
            self._append("training", "before step", self._outside_began, self._step_began)

    def end_step(self) -> None:
        """Note that ``optimizer.step()`` has returned; write the file if it was the step."""
        self._outside_began, self._outside = time.monotonic(), "between steps"
        if self.done or self._reductions != self._step:
            return
        self._append("training", "optimizer.step", self._step_began, self._outside_began)
        self._write()

    def _append(self, lane: str, name: str, began: float, ended: float) -> None:
        """Note a span of "training" or "communication", the threads, or "wire", which is part of the latter."""
        self._spans.append({"lane": lane, "name": name, "began": began + self._wall, "ended": ended + self._wall})

    def _write(self) -> None:
        self.done = True
        content = {
            "rank": self._rank,
            "size": self._size,
            "step": self._step,
            "optimizer": self._optimizer,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "spans": self._spans,
        }
        number = "" if self._optimizer == 1 else f"-{self._optimizer}"
        file = self._folder / f"rank{self._rank}{number}.json"
        partial = file.with_suffix(".partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with creating(partial) as stream:
                stream.write(json.dumps(content).encode())
            partial.replace(file)
        except OSError as error:  # no reason to stop training on one rank
            _LOG.warning("the trace of step %d could not be written to %s: %s", self._step, file, error)
