"""Ranks for tests: real processes that live as long as the test session and run functions on demand."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterable
from typing import Any

from pycomm.tools import launching
from pycomm.tools.launching import PerRank, RankOutcome
from pycomm.tools.launching.processes import variables_of

__all__ = ["PRELOAD", "SLOWER", "PerRank", "RankOutcome", "RankPool", "free_port"]

SLOWER = float(os.environ.get("PYCOMM_TEST_SLOWER", "1"))
"""Factor of all timeouts, for slow machines such as emulated processors."""

_LAZY = (
    *("collectives.backend.process_group", "ddp", "tools.monitoring"),
    *(f"training.asynchronous.{name}" for name in ("averaging", "gossip", "parameter_server")),
    *(f"training.{name}" for name in ("checkpoint", "cost.auto", "reducer")),
)
PRELOAD = (
    *("hypothesis", "pytest", "sklearn.datasets", "torch._dynamo", "torch.distributed.fsdp", "tests.on_ranks"),
    *(f"pycomm.{name}" for name in _LAZY),
)
"""Modules that are imported in the process that ranks are forked from."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port below those that the kernel assigns, so that no other connection gets it before its use."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port


class RankPool:
    """``size`` processes in one Gloo process group, spawned or, faster, ``forked``.

    Spawned ranks take seconds of a processor each, forked ones a hundredth. Tests that use ranks up have forked ones.
    """

    def __init__(self, size: int, forked: bool = False) -> None:
        self.size = size
        self._pool = launching.RankPool(size, preload=PRELOAD if forked else None)
        self._pool.run(_prepare)
        assert self._pool.port is not None
        self.port = self._pool.port
        self.ask, self.kill = self._pool.ask, self._pool.kill
        self.alive, self.close = self._pool.is_alive, self._pool.close

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[RankOutcome]:
        """Run ``function(*args)`` on every rank; of an argument in ``PerRank``, each rank gets its value."""
        return self._pool.outcomes(function, *args, timeout=timeout * SLOWER)

    def answers(self, timeout: float, ranks: Iterable[int] | None = None) -> dict[int, RankOutcome]:
        """Return the outcomes of the last call on ``ranks``, by default all, that arrive within ``timeout``."""
        return self._pool.answers(timeout * SLOWER, ranks)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Return the results by rank; fail with the tracebacks of ranks that raised."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        raised = [f"rank {rank} raised:\n{each.trace}" for rank, each in enumerate(outcomes) if each.error is not None]
        if raised:
            self.kill()  # the ranks may be out of step: the next test gets new ones
            raise AssertionError("\n".join(raised))
        return [outcome.result for outcome in outcomes]

    def errors(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[BaseException]:
        """Return the exceptions by rank; fail if a rank did not raise."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        for rank, outcome in enumerate(outcomes):
            assert outcome.error is not None, f"rank {rank} raised nothing, returned {outcome.result!r}"
        return [outcome.error for outcome in outcomes if outcome.error is not None]


def _prepare() -> None:
    """Let Ctrl-C raise; remove the launcher's variables, as libraries look for a launcher in the environment.

    Modules are kept out of collections of garbage, as in pytest's own process.
    """
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in variables_of(0, 0, 1):
        del os.environ[name]
