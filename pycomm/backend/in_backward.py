"""Errors of operations that were started inside ``backward()``, with their own types.

DistributedDataParallel waits for its buckets' futures at the end of ``backward()``, and what a future raises
is a plain ``RuntimeError`` that quotes the error. A callback of autograd that comes before
DistributedDataParallel's waits for the same operations, and raises the error itself.
"""

from __future__ import annotations

from pycomm.backend.work import BackendWork
from pycomm.torch_internals import compiles_autograd, current_graph_task, queue_final_callback


class BackwardErrors:
    """Watch over the operations of the backward pass that is running."""

    def __init__(self) -> None:
        self._pass = -1
        self._works: list[BackendWork] = []

    def watch(self, work: BackendWork) -> None:
        """Let ``backward()`` raise the error of ``work``, if it is running on this thread."""
        current = current_graph_task()
        if current < 0 or compiles_autograd():
            return
        if current != self._pass:
            works: list[BackendWork] = []
            self._pass, self._works = current, works
            queue_final_callback(lambda: _wait_for_all(works))
        self._works.append(work)


def _wait_for_all(works: list[BackendWork]) -> None:
    try:
        for work in works:
            work.wait()
    finally:
        works.clear()
