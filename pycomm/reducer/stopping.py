"""Signals that end the training of all ranks together."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Protocol


class Stoppable(Protocol):
    """Object through which all ranks can be asked to stop: a Reducer, or a handle of :func:`pycomm.ddp.register`."""

    def request_stop(self, reason: str = "") -> None: ...


class SignalStop:
    """Handler of signals that requests a stop; a context manager, which gives back the former handlers at its end.

    Made by :func:`stop_on_signal`.
    """

    def __init__(self, reducer: Stoppable, signals: tuple[int, ...]) -> None:
        self._reducer = reducer
        self._before: dict[int, Any] = {number: signal.signal(number, self._handle) for number in signals}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._reducer.request_stop(f"signal {signal.Signals(number).name}")
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def close(self) -> None:
        """Give back the handlers that the signals had before. Idempotent."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> SignalStop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def stop_on_signal(reducer: Stoppable, *signals: int) -> SignalStop:
    """Have ``signals`` that this process gets request a stop of all ranks, in place of ending this one.

    A batch system sends SIGTERM, or SIGUSR1, before it takes the machines away, often to one process only. All ranks
    learn of it at the same step: see :meth:`pycomm.Reducer.request_stop`. A handler that was there is called too,
    unless it is Python's own for Ctrl-C. Call it on any of the ranks, on the main thread.

    Args:
        reducer: what ``attach``, ``pycomm.ddp.register`` or the ``attach`` of an integration returned.
        signals: ``signal.SIGTERM`` and others.

    Returns:
        A context manager, and an object with ``close()``, which gives back the former handlers.

    Raises:
        TypeError, ValueError: ``reducer`` has no ``request_stop``, or ``signals`` are none, or not on the main thread.
    """
    if not callable(getattr(reducer, "request_stop", None)):
        raise TypeError(f"reducer is a {type(reducer).__name__}, wanted what attach() returned")
    if not signals:
        raise ValueError("stop_on_signal() got no signals, wanted signal.SIGTERM or others")
    return SignalStop(reducer, signals)
