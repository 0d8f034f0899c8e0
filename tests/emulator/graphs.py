"""CUDA graphs on the emulator: what a captured stream is given runs when the graph is launched."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from tests.emulator.arrays import library

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
VALID, INVALIDATED, UNJOINED = range(3)


class Graph:
    """What was captured. ``state`` says whether the capture ended well."""

    def __init__(self, stream: int, mode: int) -> None:
        functions = library()
        functions.emulator_begin_capture.argtypes = [ctypes.c_void_p, ctypes.c_int]
        functions.emulator_begin_capture.restype = ctypes.c_int64
        functions.emulator_end_capture.argtypes = [ctypes.c_int64]
        functions.emulator_launch_graph.argtypes = [ctypes.c_int64]
        functions.emulator_launch_graph.restype = ctypes.c_char_p
        self._number = functions.emulator_begin_capture(stream, mode)
        self.state: int | None = None

    def end(self) -> None:
        self.state = library().emulator_end_capture(self._number)

    def launch(self) -> None:
        assert self.state == VALID
        problem = library().emulator_launch_graph(self._number)
        assert problem is None, problem


@contextmanager
def capture(stream: int = 9, mode: int = GLOBAL) -> Iterator[Graph]:
    """Capture ``stream``. By default in the mode in which CUDA forbids most, to all threads."""
    graph = Graph(stream, mode)
    try:
        yield graph
    finally:
        graph.end()
