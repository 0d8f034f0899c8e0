"""Faults: what can happen to a rank, and where in its training."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycomm.collectives.communicator import Communicator
from pycomm.training.elastic.membership import Membership
from pycomm.training.reducer.engine import Engine
from pycomm.training.reducer.members import Survival
from pycomm.training.reducer.parameters import ParameterTable

_HUGE = 4 << 30  # bytes, more than the limit leaves
_LONGEST_DELAY = 5e-4  # seconds into an exchange

PLACES = ("forward", "hook", "exchange", "commit", "recovery", "join", "step")
"""In which a fault can happen. In "recovery" and "join", another rank is killed first."""

STOPPED = {"stop": 0.1, "long stop": 2.0}
"""Seconds for which a rank is stopped, by the kind of fault."""


class HookError(ValueError):
    """Error that a user's hook raises."""


@dataclass(frozen=True)
class Kind:
    """Kind of fault.

    Attributes:
        places: where it can happen.
        loses: whether the rank must be lost by it: ``None`` if either will do.
    """

    places: tuple[str, ...]
    loses: bool | None


KINDS = {
    "kill": Kind(PLACES, True),
    "stop": Kind(("forward", "hook", "exchange", "commit", "recovery", "step"), None),
    "long stop": Kind(("forward", "hook", "exchange", "commit", "recovery", "step"), True),
    "sockets": Kind(("forward", "hook", "exchange", "commit", "recovery", "step"), None),
    "memory": Kind(("forward", "hook", "exchange", "recovery"), None),
    "raise": Kind(("forward", "hook", "step"), True),
}
"""By name; a disk that is full under a checkpoint would be one more. Links that are cut befall whole hosts."""


@dataclass(frozen=True)
class Fault:
    """Fault of one rank.

    Attributes:
        kind: of :data:`KINDS`.
        place: of :data:`PLACES`.
        seed: of what else is random about it: the layer, and the moment within the place.
        after: steps to wait first.
    """

    kind: str
    place: str
    seed: int
    after: int


def shut_sockets() -> None:
    """Shut all connections of this process down. Not the sockets at which it listens: Gloo aborts without its own."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        one.shutdown(socket.SHUT_RDWR)


def exhaust_memory() -> None:
    """Limit this process to the memory that it has, and allocate more at once."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))
    np.empty(_HUGE, np.uint8)


def allow_memory() -> None:
    """Undo what :func:`exhaust_memory` has done."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


class Trap:
    """Trap of one rank, in which one fault can be set.

    Args:
        tell: says at what time the fault happens, just before.
    """

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._fault: Fault | None = None
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._calls = 0
        self._layer = 0

    def set(self, fault: Fault) -> None:
        """Let ``fault`` happen as soon as it can."""
        self._random = random.Random(fault.seed)
        self._calls, self._layer = self._random.randrange(6), self._random.randrange(1 << 20)
        self._fault = fault

    def layer(self, place: str, count: int) -> int | None:
        """Return in which of ``count`` layers the fault is to happen, if its place is ``place``."""
        fault = self._fault
        return self._layer % count if fault is not None and fault.place == place else None

    def pass_by(self, place: str) -> None:
        """Let the fault happen if ``place`` is its place; at one of the first calls in a place that is passed often."""
        fault = self._fault
        if fault is None or fault.place != place:
            return
        with self._lock:
            if place in ("recovery", "join", "exchange") and self._calls > 0:
                self._calls -= 1
                return
            if self._fault is None:
                return
            self._fault = None
        if place == "exchange" and fault.kind not in ("memory", "raise"):
            threading.Timer(self._random.random() * _LONGEST_DELAY, self._happen, [fault]).start()
        else:
            self._happen(fault)

    def _happen(self, fault: Fault) -> None:
        self._tell(time.monotonic())
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind in STOPPED:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "sockets":
            shut_sockets()
        elif fault.kind == "memory":
            exhaust_memory()
        else:
            raise HookError("a hook of the user's failed")


def _wrap(owner: Any, name: str, around: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Let what ``around`` returns surround each call of ``owner.name`` in this process."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with around():
            return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def lay(trap: Trap, told: Callable[..., None]) -> None:
    """Put ``trap`` in all places inside pycomm, in this process; ``told("noticed")`` when a rank begins to recover."""
    within: list[str] = []

    @contextlib.contextmanager
    def region(name: str) -> Iterator[None]:
        if name == "recovery":
            told("noticed", time.monotonic())
        within.append(name)
        try:
            yield
        finally:
            within.remove(name)

    @contextlib.contextmanager
    def moment(place: str = "") -> Iterator[None]:
        here = place or (within[-1] if within else "")
        trap.pass_by(here)
        yield
        trap.pass_by(here)

    _wrap(Survival, "recover", lambda: region("recovery"))
    _wrap(Survival, "let_in", lambda: region("join"))
    _wrap(Survival, "commit", lambda: moment("commit"))
    for owner, name in (
        *((Membership, "agree"), (Communicator, "move"), (Membership, "confirm")),
        (ParameterTable, "rebuild"),
    ):
        _wrap(owner, name, moment)
    exchange_of = Engine._exchange_of

    def trapped(self: Engine, *args: Any) -> Callable[[], None]:
        exchange = exchange_of(self, *args)

        def job() -> None:
            trap.pass_by("exchange")
            exchange()

        return job

    setattr(Engine, "_exchange_of", trapped)  # noqa: B010
