"""Phases of a reduction: where its time goes, and what of it is hidden behind ``backward()``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from pycomm.recorder import Recorder, labelled, listened_to
from pycomm.reducer.step_trace import StepTrace
from pycomm.torch_internals import is_profiling, profiled_range


class Phases:
    """Account of the seconds of all reductions of a rank.

    The communication thread packs (with compression: encodes, and decodes what comes) and calls collectives; the thread
    of ``backward()`` waits for the rest of that, and unpacks: hands out the gradients, and commits compression's state.

    Attributes:
        trace: gets the spans of one step, if somebody wants to see them.
    """

    def __init__(self) -> None:
        self.pack = self.wire = self.wait = self.unpack = 0.0
        self.trace: StepTrace | None = None
        self._profiling = False

    def begin(self) -> None:
        """Note that a backward pass begins."""
        self._profiling = is_profiling()
        if self.trace is not None:
            self.trace.begin_backward()

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""
        if self.trace is not None:
            self.trace.end_backward()

    def end_reduction(self) -> None:
        """Note that gradients have been handed out."""
        if self.trace is not None:
            self.trace.end_reduction()

    def end_step(self) -> None:
        """Note that ``optimizer.step()`` has returned."""
        if self.trace is not None:
            self.trace.end_step()

    def exchange(self, number: int, recorder: Recorder | None, job: Callable[[], None]) -> None:
        """Run the ``job`` that exchanges the bucket launched as ``number``; without ``recorder``, only enqueue it."""
        label = f"bucket {number}"
        began = time.monotonic()
        before = 0.0 if recorder is None else recorder.seconds
        with labelled(label), _ranges(label) if self._profiling else contextlib.nullcontext():
            job()
        if recorder is None:
            return
        ended = time.monotonic()
        wire = recorder.seconds - before
        self.wire += wire
        self.pack += ended - began - wire
        if self.trace is not None:
            self.trace.add("communication", label, began, ended)
            self.trace.add_operations(recorder, label, began)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what happens inside as waiting."""
        began = time.monotonic()
        try:
            with self._range("wait"):
                yield
        finally:
            self.wait += self._note("wait", began)

    @contextlib.contextmanager
    def unpacking(self) -> Iterator[None]:
        """Count what happens inside as unpacking."""
        began = time.monotonic()
        try:
            with self._range("unpack"):
                yield
        finally:
            self.unpack += self._note("unpack", began)

    def _note(self, name: str, began: float) -> float:
        ended = time.monotonic()
        if self.trace is not None:
            self.trace.add("training", name, began, ended)
        return ended - began

    def _range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return profiled_range(f"pycomm::{name}") if self._profiling else contextlib.nullcontext()

    def report(self) -> dict[str, float | None]:
        """Return the account; see ``Reducer.stats``."""
        busy = self.pack + self.wire
        return {
            "pack_seconds": self.pack,
            "wire_seconds": self.wire,
            "unpack_seconds": self.unpack,
            "hidden_share": max(0.0, 1.0 - self.wait / busy) if busy > 0.0 else None,
        }


@contextlib.contextmanager
def _ranges(label: str) -> Iterator[None]:
    """Show a profiler what is done inside: collectives as ranges ``pycomm::wire``, all else as ``pycomm::pack``."""
    with contextlib.ExitStack() as present:

        def change(on_the_wire: bool) -> None:
            present.close()
            present.enter_context(profiled_range(f"pycomm::{'wire' if on_the_wire else 'pack'} {label}"))

        change(False)
        with listened_to(change):
            yield
