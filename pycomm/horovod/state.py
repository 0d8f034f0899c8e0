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

from pycomm.horovod.engine import Engine
from pycomm.horovod.errors import not_initialised
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
    engine: Engine | None = None
    counters: defaultdict[str, Iterator[int]] = field(default_factory=_counters)

    def key(self, kind: str, name: str | None) -> Key:
        """Return the key of an operation that is called ``name``, or of the next one without a name."""
        return (f"{kind}.{name}", 0) if name is not None else (f"{kind}.noname", next(self.counters[kind]))


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
        on_shutdown: what ``shutdown()`` calls first.
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
    handles: dict[int, tuple[Request, Engine, Callable[[Request], Any]]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    set_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    attached: weakref.WeakSet[Reducer] = field(default_factory=weakref.WeakSet)
    on_shutdown: list[Callable[[], None]] = field(default_factory=list)
    pid: int = field(default_factory=os.getpid)


class _Here:
    world: World | None = None


_here = _Here()


def world() -> World:
    """Return the world. Raises ValueError before ``init()`` and after ``shutdown()``."""
    if _here.world is None:
        raise not_initialised()
    return _here.world


def known_world() -> World | None:
    """Return the world; ``None`` before ``init()`` and after ``shutdown()``."""
    return _here.world


def set_world(made: World | None) -> None:
    """Make ``made`` the world, or have none."""
    _here.world = made
