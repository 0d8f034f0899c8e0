"""Group of ranks that train, as the process sees it that started them, keeps their store, and replaces the lost."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.chaos.faults import STOPPED, Fault
from bench.chaos.ranks import Setup, enter_namespace, serve
from pycomm.tools.launching import RankProcesses

_PORT = 29577  # in a namespace, where nobody else is
_DUMP = 1.0  # seconds for ranks to say where they hang
_PRELOAD = ("bench.chaos.ranks", "pycomm.training.cost.auto", "pycomm.training.reducer", "torch._dynamo")


class HangError(RuntimeError):
    """An awaited event did not happen in time."""


@contextlib.contextmanager
def store_at(address: str = "", namespace: str = "") -> Iterator[str]:
    """Keep a store in this process; its sockets are in the network ``namespace``. Yields its address."""
    with open("/proc/self/ns/net") as own:
        if namespace:
            enter_namespace(namespace)
        try:
            store = TCPStore(
                address or "127.0.0.1",
                _PORT if namespace else 0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=60),
            )
        finally:
            if namespace:
                enter_namespace(f"/proc/self/fd/{own.fileno()}")
    yield f"{address or '127.0.0.1'}:{store.port}"
    del store


@dataclass
class Member:
    """One process of the group.

    Attributes:
        number: what pycomm calls it; -1 until it has come.
        happened: when a fault has happened to it, and in which step; ``None`` before.
        noticed: when it began to recover, each time.
        done: when it ended each step.
        world: as it last saw it.
        recoveries: seconds that they took, by its own count.
        vitals: what it holds, as it last told.
        base: what it held at first.
        end: why it has ended; ``None`` while it has not.
    """

    setup: Setup
    started: RankProcesses
    number: int = -1
    happened: tuple[float, int] | None = None
    noticed: list[float] = field(default_factory=list)
    done: dict[int, float] = field(default_factory=dict)
    world: tuple[int, ...] = ()
    recoveries: list[float] = field(default_factory=list)
    vitals: dict[str, int] = field(default_factory=dict)
    base: dict[str, int] = field(default_factory=dict)
    end: str | None = None

    @property
    def step(self) -> int:
        """The last step that it has ended."""
        return max(self.done, default=-1)

    @property
    def pid(self) -> int | None:
        return self.started.processes[0].pid

    def order(self, order: str, argument: Any = None) -> None:
        """Have it do something before its next step."""
        with contextlib.suppress(OSError):
            self.started.pipes[0].send((order, argument))


class Group:
    """Group of ``size`` ranks like ``setup``.

    Args:
        hosts: letters of the hosts that ranks say they are on, in turns.
        namespaces: of the network, that they are in, in turns.

    Attributes:
        members: processes that have not ended.
        digests: of the parameters after each step.
        problems: what was wrong, until somebody takes it.
        begun: steps that any rank has begun.
        attendance: number of ranks that have ended each step.
        losses: that ranks have told at their end.
        gone: members that have ended.
    """

    def __init__(self, setup: Setup, size: int, hosts: str = "", namespaces: Sequence[str] = ()) -> None:
        self.members: list[Member] = []
        self.digests: dict[int, str] = {}
        self.problems: list[str] = []
        self.begun: set[int] = set()
        self.attendance: Counter[int] = Counter()
        self.losses: list[float] = []
        self.gone: list[Member] = []
        self._to_wake: list[tuple[float, int]] = []
        self._kinds: dict[int, str] = {}
        for rank in range(size):
            host = hosts[rank % len(hosts)] if hosts else ""
            namespace = namespaces[rank * len(namespaces) // size] if namespaces else ""
            self.start(replace(setup, rank=rank, size=size, host=host, namespace=namespace))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.started.kill()
            member.started.end()

    def start(self, setup: Setup) -> Member:
        """Start one more process."""
        self.members.append(Member(setup, RankProcesses(serve, 1, (setup,), preload=_PRELOAD)))
        return self.members[-1]

    def replace(self, lost: Member) -> Member:
        """Start a newcomer where ``lost`` was."""
        return self.start(replace(lost.setup, rank=-1))

    def strike(self, member: Member, fault: Fault) -> None:
        """Inject ``fault`` into ``member``."""
        member.happened = None
        self._kinds[id(member)] = fault.kind
        member.order("fault", fault)

    def until(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        """Listen to the ranks until ``condition`` is true.

        Raises:
            HangError: it was not true within ``seconds``; the ranks have written where they are.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                states = ", ".join(f"{m.number}: step {m.step}, world {m.world}" for m in self.members)
                for member in self.members:
                    if member.pid is not None:
                        os.kill(member.pid, signal.SIGUSR1)
                time.sleep(_DUMP)
                raise HangError(f"not within {seconds:g} s: {what} ({states})")
            self._listen(0.02)

    def rank_of(self, number: int) -> Member:
        """Return the member that is rank ``number`` in pycomm."""
        return next(member for member in self.members if member.number == number)

    def _listen(self, seconds: float) -> None:
        for when, pid in list(self._to_wake):
            if time.monotonic() >= when:
                self._to_wake.remove((when, pid))
                os.kill(pid, signal.SIGCONT)
            else:
                seconds = min(seconds, when - time.monotonic())
        sources = {member.started.pipes[0]: member for member in self.members}
        for source in wait(list(sources), max(0.0, seconds)):
            member = sources[source]  # type: ignore[index]
            pipe = member.started.pipes[0]
            try:
                while pipe.poll():
                    self._hear(member, *pipe.recv())
            except (EOFError, OSError):
                self._bury(member)

    def _bury(self, member: Member) -> None:
        process = member.started.processes[0]
        process.join()
        if member.end is None:
            member.end = f"died ({process.exitcode})"
        self.members.remove(member)
        self.gone.append(member)
        member.started.end()

    def _hear(self, member: Member, kind: str, *content: Any) -> None:
        if kind == "begun":
            self.begun.add(content[0])
        elif kind == "ended step":
            self._compare(member, *content)
        elif kind == "fault":
            member.happened = content
            pause = STOPPED.get(self._kinds.get(id(member), ""))
            if pause is not None and member.pid is not None:
                self._to_wake.append((content[0] + pause, member.pid))
        elif kind == "noticed":
            member.noticed.append(content[0])
        elif kind == "ready":
            member.number, member.world = content
        elif kind == "vitals":
            member.vitals = content[0]
        elif kind == "loss":
            self.losses.append(content[0])
        else:
            member.end = content[0]

    def _compare(
        self, member: Member, step: int, when: float, digest: str, world: tuple[int, ...], seconds: list[float]
    ) -> None:
        self.attendance[step] += 1
        member.done[step], member.world, member.recoveries = when, world, seconds
        if self.digests.setdefault(step, digest) != digest:
            self.problems.append(f"rank {member.number} differs after step {step}")

    def end(self, seconds: float = 30.0) -> None:
        """Let all ranks end after the same step."""
        setup = self.members[0].setup
        ahead = 0.5 / max(
            0.002, setup.pause * max(1, setup.local_steps)
        )  # steps that they may make before they hear it
        last = max(member.step for member in self.members) + 2 + int(ahead)
        for member in self.members:
            member.order("end", last)
        ending = list(self.members)
        self.until("the end", lambda: not self.members, seconds)
        self.problems += [f"rank {m.number} ended with: {m.end}" for m in ending if m.end]
