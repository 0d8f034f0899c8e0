"""Attendance: which ranks take part."""

from __future__ import annotations

from collections.abc import Callable

from pycomm.reducer.engine import Engine


class Attendance:
    """The part of :class:`pycomm.Reducer` that is about which ranks take part."""

    _detached = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks that take part, by the numbers that they got when they came; it changes with ``on_failure="shrink"``.

        The first ones have the numbers of their ranks, newcomers the next ones. This process's place among them is its
        rank now.
        """
        return self._engine.world

    def on_change(self, callback: Callable[[tuple[int, ...], tuple[int, ...]], None]) -> None:
        """Call ``callback(old_world, new_world)`` on each rank that is left whenever :attr:`world` has changed.

        It is called at the end of the ``backward()`` in which that happened, before ``optimizer.step()``: the place
        to divide samples anew, or to scale the learning rate. Never called with ``on_failure="raise"``.
        """
        self._require_attached()
        if self._engine.survival is not None:
            self._engine.survival.on_change(callback)

    def _require_attached(self) -> None:
        if self._detached:
            raise RuntimeError("this Reducer is detached")
