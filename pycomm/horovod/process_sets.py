"""Horovod's state in this process: the ranks and their process sets."""

from __future__ import annotations

import itertools
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from pycomm.collectives.communicator import Communicator
from pycomm.collectives.transport import late_ranks
from pycomm.errors import attempt
from pycomm.horovod.coordinator import BARRIER, Key, Request, RequestTerms
from pycomm.horovod.engine import NegotiatingEngine
from pycomm.horovod.environment import meeting_seconds
from pycomm.horovod.names import InvalidRequestError
from pycomm.horovod.timeline import Timeline
from pycomm.training.reducer import Reducer


def _counters() -> defaultdict[str, Iterator[int]]:
    return defaultdict(lambda: itertools.count(1))


@dataclass(eq=False)
class Members:
    """Members of a process set.

    Attributes:
        ranks: global ranks, rising.
        group, engine: torch's process group, and the engine, of these ranks; ``None`` on other ranks.
        counters: numbers of operations without a name, by kind.
    """

    ranks: Sequence[int]
    group: dist.ProcessGroup | None = None
    engine: NegotiatingEngine | None = None
    counters: defaultdict[str, Iterator[int]] = field(default_factory=_counters)

    def key(self, kind: str, name: str | None) -> Key:
        """Return the key of an operation that is called ``name``, or of the next one without a name."""
        return (f"{kind}.{name}", 0) if name is not None else (f"{kind}.noname", next(self.counters[kind]))

    def close(self, reason: str) -> None:
        """End the set's unfinished operations."""
        if self.engine is not None:
            self.engine.close(reason)


@dataclass(eq=False)
class World:
    """World: all ranks.

    Attributes:
        rank, size: of this process, and how many there are.
        local: ranks of this host.
        hosts: number of ranks of each host, in the order of their first ranks.
        cross: ranks with this one's local rank, one on each host that has one.
        sets: process sets by id; 0 has all ranks.
        timeout: limit of every single wait.
        stall_check, cycle: seconds; see ``stall_check_seconds`` and ``cycle_seconds`` of the environment.
        handles: by handle: the request, its engine, and the function that returns its result.
        owns_group: whether ``init()`` made torch's process group.
        numbers, set_ids: the next handles and process set ids.
        attached: Reducers of wrapped optimizers.
        checks: ``StepTerms`` of the other wrapped optimizers.
        on_shutdown: methods that ``shutdown()`` calls first, if their objects still exist.
        pid: the process that called ``init()``, to detect forks.
    """

    rank: int
    size: int
    local: Sequence[int]
    hosts: Sequence[int]
    cross: Sequence[int]
    timeout: timedelta
    stall_check: float
    cycle: float
    timeline: Timeline
    owns_group: bool
    sets: dict[int, Members] = field(default_factory=dict)
    handles: dict[int, tuple[Request, NegotiatingEngine, Callable[[Request], Any]]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    set_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    attached: weakref.WeakSet[Reducer] = field(default_factory=weakref.WeakSet)
    checks: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
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
    """Set or remove the world."""
    _worlds[:] = [] if made is None else [made]


class ProcessSet:
    """Process set: ranks that run operations together, once it has been passed to ``init()`` or ``add_process_set()``.

    Args:
        ranks_or_comm: global ranks, in any order, or an mpi4py communicator whose ranks are numbered as ``init()`` has
            numbered them.

    Attributes:
        process_set_id: its number, the same on all ranks; ``None`` while it is not in use.
        ranks: global ranks, rising.
    """

    process_set_id: int | None = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        self.mpi_comm = None if isinstance(ranks_or_comm, Iterable) else ranks_or_comm
        if self.mpi_comm is not None and not hasattr(self.mpi_comm, "Get_group"):
            raise ValueError(
                f"ranks_or_comm is a {type(ranks_or_comm).__name__}, wanted a list of ranks or an mpi4py communicator"
            )
        ranks = ranks_of_comm(self.mpi_comm) if self.mpi_comm is not None else list(ranks_or_comm)
        if any(not isinstance(rank, int) or isinstance(rank, bool) for rank in ranks):
            raise ValueError(f"ranks_or_comm is {ranks!r}, wanted ranks, which are integers")
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"ranks_or_comm is {ranks!r}, wanted every rank once")
        self.ranks: list[int] = sorted(ranks)

    def size(self) -> int | None:
        """Return the number of ranks; ``None`` while it is not in use."""
        return None if self.process_set_id is None else len(members_of(self).ranks)

    def rank(self) -> int | None:
        """Return this process's rank within the set; ``None`` while it is not in use.

        ``root_rank`` of a broadcast is a global rank, not this one.

        Raises:
            ValueError: this process is not in the set.
        """
        if self.process_set_id is None:
            return None
        members = members_of(self)
        require_included(self, members)
        return list(members.ranks).index(world().rank)

    def included(self) -> bool | None:
        """Return whether this process is in the set; ``None`` before ``init()``."""
        here = known_world()
        return None if here is None else here.rank in self.ranks

    def _take_out_of_use(self) -> None:
        """Note that it has no number any more."""
        self.process_set_id = None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""The set of all ranks."""
global_process_set.process_set_id = 0


def ranks_of_comm(comm: Any) -> list[int]:
    """Return the ranks, in MPI's world, of an mpi4py communicator."""
    from mpi4py import MPI  # only those who have it pass one

    return list(MPI.Group.Translate_ranks(comm.Get_group(), None, MPI.COMM_WORLD.Get_group()))


def members_of(process_set: ProcessSet) -> Members:
    """Return the members of ``process_set``."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set is a {type(process_set).__name__}, wanted a ProcessSet")
    here = world()
    if process_set.process_set_id is None or process_set.process_set_id not in here.sets:
        raise ValueError(f"process_set is {process_set!r}, which is not in use: pass it to add_process_set() first")
    return here.sets[process_set.process_set_id]


def known_set(process_set: Any, included: bool = True) -> tuple[ProcessSet, Exception | None]:
    """Return the set whose ranks learn of errors, and the error in ``process_set``, if any.

    ``included``: whether this rank must be in it. If there are several sets, so that the other ranks' set is unknown,
    the error is raised.
    """
    try:
        members = members_of(process_set)
        if included:
            require_included(process_set, members)
        return process_set, None
    except Exception as error:
        if len(world().sets) > 1:
            raise
        return global_process_set, error


def require_included(process_set: ProcessSet, members: Members) -> None:
    """Raise ValueError if this process is not in ``process_set``."""
    if world().rank not in members.ranks:
        raise ValueError(f"process_set is {process_set!r}, without rank {world().rank}, which is this one")


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Activate a process set, and return it. All ranks must call this, with the same ranks.

    Args:
        process_set: a :class:`ProcessSet` that is not in use, or global ranks.

    Raises:
        ValueError: a set of these ranks is in use already, or there is no such rank, or the ranks pass different
            ones (on every rank).
    """
    here = world()

    def checked() -> ProcessSet:
        made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        _require_new(made, here)
        return made

    made = attempt(checked)
    if isinstance(made, Exception):
        agree("add_process_set", made)
        raise made
    agree(f"add_process_set ranks={made.ranks}")
    _open(made, here)
    return made


def open_sets(process_sets: Sequence[ProcessSet] | Exception, here: World) -> None:
    """Activate ``process_sets``. Collective. An error in their place is raised on all ranks."""
    if isinstance(process_sets, Exception):
        agree("init", process_sets)
        raise process_sets
    agree(f"init process_sets={[made.ranks for made in process_sets]}")
    for i, made in enumerate(process_sets):
        try:  # same outcome on all ranks
            _require_new(made, here)
        except ValueError as error:
            raise ValueError(f"process_sets[{i}]: {error}") from None
        _open(made, here)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Deactivate a process set; return whether it was active. All ranks must call this.

    Its operations must have ended. The set of all ranks cannot be removed.
    """
    here, given = world(), cast(object, process_set)
    if not isinstance(given, ProcessSet):
        agree("remove_process_set", TypeError(f"process_set is a {type(given).__name__}, wanted a ProcessSet"))
    number = process_set.process_set_id or 0
    is_in_use = number > 0 and number in here.sets
    agree(f"remove_process_set {process_set.ranks if is_in_use else 'that is not in use'}")
    if not is_in_use:
        return False
    members = here.sets.pop(number)
    process_set._take_out_of_use()
    members.close("its process set was removed")
    if members.group is not None:
        dist.destroy_process_group(members.group)
    return True


def agree(what: str, problem: Exception | None = None) -> None:
    """Wait until all ranks call this with the same ``what``.

    Raises:
        InvalidRequestError: on every rank: the ranks differ, or another one has a ``problem``. This rank's own is
            raised as it is.
    """
    here = world()
    everybody = here.sets[0]
    assert everybody.engine is not None
    refusal = "" if problem is None else f"cannot take part: {problem}"
    request = Request(everybody.key("process_sets", None), RequestTerms(BARRIER, detail=what), refusal=refusal)
    everybody.engine.submit(request, wake=False)
    try:
        everybody.engine.wait(request)
    except InvalidRequestError:
        if problem is not None:
            raise problem from None
        raise


def _require_new(process_set: ProcessSet, here: World) -> None:
    strangers = [rank for rank in process_set.ranks if not 0 <= rank < here.size]
    if strangers:
        raise ValueError(f"process_set has rank {strangers[0]}, wanted ranks of 0 to {here.size - 1}")
    if any(list(members.ranks) == process_set.ranks for members in here.sets.values()):
        raise ValueError(f"process_set has ranks {process_set.ranks}, and a set of these exists already")


def _open(process_set: ProcessSet, here: World) -> None:
    number = next(here.set_ids)
    members = Members(process_set.ranks)
    if process_set.ranks:
        group = dist.new_group(process_set.ranks, timeout=timedelta(seconds=meeting_seconds()))
        if here.rank in process_set.ranks:
            members.group = group
            members.engine = engine_over(group, f"set{number}", here)
    here.sets[number] = members
    process_set.process_set_id = number
    here.on_shutdown.append(weakref.WeakMethod(process_set._take_out_of_use))


def engine_over(group: dist.ProcessGroup, name: str, here: World) -> NegotiatingEngine:
    """Return an engine over a communicator of its own among the ranks of ``group``. Collective among them."""
    communicator = Communicator(group, here.timeout)
    late_ranks.forget(communicator.channel.recorder)  # waiting in rounds is normal: _StallWatch logs stalls instead
    return NegotiatingEngine(communicator, name, here.timeline, here.stall_check, here.cycle)
