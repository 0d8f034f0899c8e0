"""Long-lived workers: an object on each rank, whose methods the driver calls on all ranks at once.

The driver starts every group once and lets the groups work in turns. Between turns a rank blocks in a read and uses no
core, even if its communication library would poll. Ranks end when the driver does.
"""

from __future__ import annotations

import atexit
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from pycomm.tools.launching import RankError, RankPool, StartedRanks

PATIENCE_SECONDS = 10.0
STARTUP_SECONDS = 120.0
_TURN_SECONDS = 600.0
_QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

Start = Callable[[int, Mapping[str, str]], StartedRanks]
"""Starts a number of ranks, with variables that are added to this process's environment."""

_worker: Any = None  # of this process, if it is a rank


class WorkerGroup:
    """Group of ``size`` processes with a ``worker`` ("module:Class") each. A context manager.

    If workers have a method ``close``, it is called before their processes end.

    Args:
        name: for error messages.
        setup: arguments of the worker's constructor.
        environment: added to this process's.
        start: starts the ranks; by default they start here, with RANK and WORLD_SIZE in their environment.
    """

    def __init__(
        self,
        name: str,
        worker: str,
        size: int,
        setup: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        start: Start | None = None,
    ) -> None:
        self.name, self.size = name, size
        self._pool = RankPool(size, backend=None, environment={**_QUIET, **(environment or {})}, start=start)
        try:
            self._run(STARTUP_SECONDS, _make, worker, dict(setup))
        except BaseException:
            self._pool.close()
            raise

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call the workers' ``method`` on all ranks at once; return the results in rank order.

        Raises:
            RankError: the method raised on a rank, or a rank died or did not answer. The group cannot be used again.
        """
        return self._run(_TURN_SECONDS, _call, method, arguments)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close(patience=2 * PATIENCE_SECONDS)  # ranks may finish their turn before they are ended

    def _run(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        try:
            return self._pool.run(function, *arguments, timeout=seconds)
        except RankError as error:
            raise RankError(f"{self.name}: {error}", error.rank, error.traceback, error.signal) from None


def _make(worker: str, setup: Mapping[str, Any]) -> None:
    global _worker
    module, _, name = worker.partition(":")
    _worker = getattr(importlib.import_module(module), name)(**setup)
    if hasattr(_worker, "close"):
        atexit.register(_worker.close)


def _call(method: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_worker, method)(*arguments)
