"""State of Horovod in this process: the ranks, and the process sets among them. One place, as Horovod has one state."""

from __future__ import annotations

import itertools
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pycomm.horovod.engine import NegotiatingEngine
from pycomm.horovod.requests import Key, Request
from pycomm.horovod.timeline import Timeline
from pycomm.reducer import Reducer


def _counters() -> defaultdict[str, Iterator[int]]:
    return defaultdict(lambda: itertools.count(1))


@dataclass(eq=False)
class Members:
    """Members of a process set.

    Attributes:
        ranks: global ranks, rising.
        group: torch's group of them; ``None`` on other ranks.
        engine: that agrees with them; ``None`` on other ranks.
        counters: numbers for operations without a name, by kind.
    """

    ranks: Sequence[int]
    group: dist.ProcessGroup | None = None
    engine: NegotiatingEngine | None = None
    counters: defaultdict[str, Iterator[int]] = field(default_factory=_counters)

    def key(self, kind: str, name: str | None) -> Key:
        """Return the key of an operation that is called ``name``, or of the next one without a name."""
        return (f"{kind}.{name}", 0) if name is not None else (f"{kind}.noname", next(self.counters[kind]))

    def close(self, reason: str) -> None:
        """End what the set has outstanding."""
        if self.engine is not None:
            self.engine.close(reason)


@dataclass(eq=False)
class World:
    """World: all ranks.

    Attributes:
        rank, size: of this process, and how many there are.
        local: ranks of this host.
        hosts: number of ranks of each host, in the order of their first ranks.
        cross: ranks with this one's local rank, one on each host that has so many.
        sets: process sets by id; 0 is the one of all ranks.
        timeout: limit of every single wait.
        handles: results to come, by handle: the request, and what ``synchronize`` makes of it.
        owns_group: whether torch's process group was made by ``init()``.
        numbers, set_ids: the next handles, and the next process sets' numbers.
        attached: what averages the gradients of optimizers in buckets, on this rank among others.
        on_shutdown: methods that ``shutdown()`` calls first, if their objects still are.
        pid: the process that has called ``init()``, of which a fork has a copy.
    """

    rank: int
    size: int
    local: Sequence[int]
    hosts: Sequence[int]
    cross: Sequence[int]
    timeout: timedelta
    timeline: Timeline
    owns_group: bool
    sets: dict[int, Members] = field(default_factory=dict)
    handles: dict[int, tuple[Request, NegotiatingEngine, Callable[[Request], Any]]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    set_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    attached: weakref.WeakSet[Reducer] = field(default_factory=weakref.WeakSet)
    on_shutdown: list[weakref.WeakMethod[Callable[[], None]]] = field(default_factory=list)
    pid: int = field(default_factory=os.getpid)


_worlds: list[World] = []
"""The world, if there is one."""


def world() -> World:
    """Return the world. Raises ValueError before ``init()`` and after ``shutdown()``."""
    if not _worlds:
        raise ValueError("Horovod has not been initialized; call hvd.init() first")
    return _worlds[0]


def known_world() -> World | None:
    """Return the world; ``None`` before ``init()`` and after ``shutdown()``."""
    return _worlds[0] if _worlds else None


def set_world(made: World | None) -> None:
    """Make ``made`` the world, or have none."""
    _worlds[:] = [] if made is None else [made]
