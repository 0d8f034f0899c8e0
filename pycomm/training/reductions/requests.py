"""Requests of a rank to all others: to leave out a step, and to end the training together."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol


@dataclass(frozen=True)
class StopRequest:
    """Request of a rank to end the training. False until there is one; all ranks receive it at the same step.

    Attributes:
        rank: first rank that asked; -1 without a request.
        reason: its reason.
    """

    rank: int = -1
    reason: str = ""

    def __bool__(self) -> bool:
        return self.rank >= 0


class Requests:
    """Requests of this rank, until all ranks have received them. Any thread, and a signal handler, may make one.

    Attributes:
        veto, stop: reasons; ``None`` without a request.
        stop_requested: the request to stop that all ranks have received.
    """

    def __init__(self) -> None:
        self.veto: str | None = None
        self.stop: str | None = None
        self.stop_requested = StopRequest()

    def request_stop(self, reason: str, lone_rank: int | None = None) -> None:
        """Ask all ranks to stop with the next reduction, or at once if ``lone_rank`` is the only rank."""
        if lone_rank is not None and not self.stop_requested:
            self.stop_requested = StopRequest(lone_rank, reason)
        elif self.stop is None and not self.stop_requested:
            self.stop = reason

    def receive(self, stops: Mapping[int, str | None]) -> None:
        """Receive the requests to stop of all ranks."""
        requests = (StopRequest(rank, reason) for rank, reason in stops.items() if reason is not None)
        self.stop_requested = self.stop_requested or next(requests, self.stop_requested)
        if self.stop_requested:
            self.stop = None


class Stoppable(Protocol):
    """Object with ``request_stop``: a Reducer, or a handle of :func:`pycomm.ddp.register`."""

    def request_stop(self, reason: str = "") -> None: ...


class SignalStop:
    """Signal handler that requests a stop. As a context manager, it restores the former handlers on exit.

    Created by :func:`stop_on_signal`.
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
        """Restore the former handlers. Idempotent."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> SignalStop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stop_on_signal(reducer: Stoppable, *signals: int) -> SignalStop:
    """Request a stop of all ranks when this process receives one of ``signals``, instead of ending it.

    A batch system sends SIGTERM or SIGUSR1 before it takes the machines away, often to one process only. All ranks
    receive the request at the same step: see :meth:`pycomm.Reducer.request_stop`. A former handler is called too,
    unless it is Python's own for Ctrl-C. Call it on any rank, on the main thread.

    Args:
        reducer: result of ``attach``, ``pycomm.ddp.register``, or an integration's ``attach``.
        signals: ``signal.SIGTERM`` and others.

    Returns:
        A context manager, also with ``close()``, that restores the former handlers.

    Raises:
        TypeError, ValueError: ``reducer`` has no ``request_stop``, there are no ``signals``, or this is not the main
            thread.
    """
    if not callable(getattr(reducer, "request_stop", None)):
        raise TypeError(f"reducer is a {type(reducer).__name__}, wanted what attach() returned")
    if not signals:
        raise ValueError("stop_on_signal() got no signals, wanted signal.SIGTERM or others")
    return SignalStop(reducer, signals)
