"""Decoupled averaging: ranks of different speeds push their parameter changes to a center, and continue from it."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pycomm import checks, threads
from pycomm.agreement import agreed
from pycomm.collectives.broadcasting import signature
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.transport import rendezvous
from pycomm.collectives.transport.choice import version
from pycomm.compression import Compression
from pycomm.compression.dense import method_text
from pycomm.deprecated import settled
from pycomm.descriptions import counted, settings_text, tensors_text
from pycomm.errors import CommError, attempt
from pycomm.optim.parameters import checked_optimizer
from pycomm.training.asynchronous.averager import (
    Averager,
    check_outer,
    checked_parameters,
    checked_per_rank,
    clone_tensors,
    named_method,
)
from pycomm.training.asynchronous.core import Core, Piece, ShardOptimizer, cut
from pycomm.training.asynchronous.fragment import DelayedNesterov, Nesterov
from pycomm.training.asynchronous.loop import Loop, TrackedParameters
from pycomm.training.asynchronous.modes import AsyncRules, Compensator, Rules
from pycomm.training.asynchronous.packing import Packer, Unpackers
from pycomm.training.asynchronous.server_meeting import ServerMeeting
from pycomm.training.asynchronous.serving import Serving
from pycomm.training.asynchronous.wire import SharedMemory
from pycomm.training.asynchronous.worker import ServerLink

_REMEMBERED = 32
_COMPARED = 16
"""Number of steps between two meetings of the fastest rank after which groups' numbers are compared."""


@dataclass
class _RankPace:
    """Recent rounds of a rank, each from its pull to its push.

    Attributes:
        since: start of the present round.
        durations: seconds of the last rounds.
        samples: samples of the last rounds.
    """

    since: float
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    @property
    def rate(self) -> float:
        """Samples per second; 0 if nothing is known."""
        total = sum(self.durations)
        return sum(self.samples) / total if total > 0 else 0.0

    def remaining(self, now: float) -> float:
        """Return the expected seconds until the push: a mean over the rounds longer than now; ``inf`` without any."""
        taken = now - self.since
        longer = [duration for duration in self.durations if duration > taken]
        return mean(longer) - taken if longer else math.inf


class RankArrivals:
    """Times at which ranks began and ended their rounds, in seconds of any clock."""

    def __init__(self) -> None:
        self._ranks: dict[int, _RankPace] = {}

    def begin(self, rank: int, now: float) -> None:
        self._ranks.setdefault(rank, _RankPace(now)).since = now

    def arrive(self, rank: int, now: float, samples: float) -> None:
        known = self._ranks.setdefault(rank, _RankPace(now))
        if now > known.since:
            known.durations.append(now - known.since)
            known.samples.append(samples)

    def forget(self, rank: int) -> None:
        self._ranks.pop(rank, None)

    def worth_waiting(self, here: Collection[int], quorum: int, now: float) -> float:
        """Return how many seconds a merge should wait so that the ranks lose the fewest samples; 0 for not at all.

        Args:
            here: ranks that have pushed.
            quorum: number of ranks that the next merge requires.
            now: the time.
        """
        late = sorted(
            (known.remaining(now), rank)
            for rank, known in self._ranks.items()
            if rank not in here and known.remaining(now) < math.inf
        )
        least, best = self._undone([*here], late, 0.0, quorum), 0.0
        for count, (seconds, _) in enumerate(late, start=1):
            come = [rank for _, rank in late[:count]]
            undone = self._undone([*here, *come], late[count:], seconds, quorum)
            undone += sum(self._ranks[rank].rate * seconds for rank in here)
            undone += sum(self._ranks[rank].rate * (seconds - at) for at, rank in late[:count])
            if undone < least:
                least, best = undone, seconds
        return best

    def _undone(self, merged: list[int], late: list[tuple[float, int]], after: float, quorum: int) -> float:
        """Return how many samples the ``late`` ranks lose while they wait for the next merge but one.

        The next merge is in ``after`` seconds. The one after it requires a quorum of the ``merged`` and late ranks.
        """
        again = [after + mean(self._ranks[rank].durations) for rank in merged if self._ranks[rank].durations]
        arrivals = sorted([*again, *(at for at, _ in late)])
        if len(arrivals) < quorum:
            return 0.0  # its time is unknown
        following = arrivals[quorum - 1]
        return sum(self._ranks[rank].rate * max(0.0, following - at) for at, rank in late)


class GraceQuorum(Rules):
    """An update takes the mean of at least ``quorum`` workers' contributions, and waits for others while that pays.

    Args:
        quorum: fewest workers; all workers if there are fewer.
        clock: returns the time in seconds.
    """

    def __init__(self, quorum: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._quorum, self._clock = quorum, clock
        self._here: set[int] = set()
        self._arrivals = RankArrivals()

    def leave(self, worker: int) -> None:
        super().leave(worker)
        self._here.discard(worker)
        self._arrivals.forget(worker)

    def may_pull(self, worker: int) -> bool:
        return worker not in self._here

    def pulled(self, worker: int) -> None:
        self._arrivals.begin(worker, self._clock())

    def push(self, worker: int, staleness: int, samples: float) -> bool:
        self._here.add(worker)
        self._arrivals.arrive(worker, self._clock(), samples)
        return super().push(worker, staleness, samples)

    def is_due(self) -> bool:
        return self._is_enough() and self.seconds_left() == 0

    def seconds_left(self) -> float:
        if self.num_collected == 0 or not self._is_enough():
            return math.inf
        return self._arrivals.worth_waiting(self._here, self._quorum, self._clock())

    def _is_enough(self) -> bool:
        return len(self._here) >= min(self._quorum, len(self.workers))

    def updated(self) -> None:
        super().updated()
        self._here.clear()


_FORMAT = 1


def decoupled_sgd(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    every: int,
    outer: DelayedNesterov | Nesterov | None = None,
    quorum: int | None = None,
    compression: Compression | str | None = None,
    per_rank: Iterable[str] = (),
    timeout: timedelta | float | None = None,
) -> Averager:
    """Let ranks of different speeds step by themselves, and merge their changes without waiting for all ranks.

    The loop stays ``zero_grad``, ``backward``, ``step``, as with :func:`local_sgd`. At a meeting, a rank pushes the
    change of its parameters to the center, a thread on rank 0, and continues from the center's new parameters. Slower
    ranks meet after fewer steps, in about the same time (dynamic local updates: Liu et al., "Asynchronous Local-SGD
    Training for Language Modeling", 2024). Training continues if a rank is lost; if rank 0 is lost, all others get a
    CommError.

    Args:
        optimizer: any torch optimizer.
        model: its parameters must all belong to the optimizer, be all float32 or all float64, and in CPU memory.
        every: number of steps of the fastest rank between its meetings.
        outer: how contributions are applied. ``pycomm.DelayedNesterov()``: one by one, as they arrive;
            ``pycomm.Nesterov()``: by their mean, with a ``quorum``. ``None``: whichever of them goes with ``quorum``.
        quorum: number of ranks whose contributions are averaged. The center waits for others while that pays, judged
            by their past arrivals; the rest take part in a later average. Ranks are weighted by their steps, times the
            number given to ``set_weight`` ("Decoupled DiLoCo", 2026).
        compression: method, an object or a name such as "fp16", by which the change of the parameters travels. Its
            residual is added at the next meeting.
        per_rank: keys of parameter groups whose numbers may differ between ranks after equally many steps, as for
            :func:`local_sgd`. A rank that has skipped a step is not compared from then on.
        timeout: limit of every wait for a peer; seconds or ``timedelta``. ``None``: the process group's own.

    Raises:
        TypeError, ValueError: an argument is wrong, or arguments or names, shapes or dtypes of parameters differ
            between ranks: on every rank. From ``optimizer.step()``: ``model`` or ``optimizer`` has other parameters
            now, or another rank's learning rate, or another number of its groups, was different after equally many
            steps.
        CommError: a rank did not come. ``optimizer.step()`` raises it, too, if rank 0 is lost.
        RuntimeError: from ``optimizer.step()``: a parameter of this rank is not finite.
    """
    made = attempt(lambda: _checked(optimizer, model, every, quorum, outer, compression, per_rank))
    if dist.is_initialized():  # a rank that has called local_sgd() instead opens a communicator, too
        with Communicator(timeout=timeout) as communicator:
            same = {"setting": ["ranks meet one by one"]}
            agreed(communicator.channel.all_gather_bytes, made, lines=lambda _: same)
    meeting = ServerMeeting(timeout)
    if isinstance(made, Exception):
        meeting.compare([], made)  # raises it
        raise AssertionError("a meeting goes on only without a problem")
    meeting.compare(made.lines)
    loop = Loop(TrackedParameters(model, made.optimizer, made.named, "decoupled_sgd()"), made.per_rank)
    pace = Pace(every, quorum, made.outer, made.method, meeting.timeout)
    return DecoupledAverager(meeting, made.optimizer, made.named, pace, loop)


class _Checked(NamedTuple):
    """Checked arguments of :func:`decoupled_sgd`, and lines of them that must be equal on all ranks."""

    optimizer: torch.optim.Optimizer
    named: dict[str, torch.Tensor]
    outer: DelayedNesterov | Nesterov
    method: Compression | None
    per_rank: tuple[str, ...]
    lines: list[str]


def _checked(
    optimizer: Any, model: Any, every: Any, quorum: Any, outer: Any, compression: Any, per_rank: Any
) -> _Checked:
    optimizer = checked_optimizer(optimizer, model, "decoupled_sgd")
    named = checked_parameters(optimizer, model, every, call="decoupled_sgd()")
    merges = _checked_outer(settled(outer), quorum)
    if next(iter(named.values())).device.type != "cpu":
        raise ValueError("ranks that meet one by one require parameters in CPU memory")
    method = named_method(compression)
    check_outer(method, merges)
    names = checked_per_rank(per_rank, optimizer)
    lines = [f"pycomm {version()}", f"every={every}", f"outer={merges!r}", f"quorum={quorum}", f"{method!r}"]
    lines += [f"per_rank={names}", type(optimizer).__name__]
    lines += [f"{name}: {signature(p)}" for name, p in named.items()]
    return _Checked(optimizer, named, merges, method, names, lines)


def _checked_outer(outer: Any, quorum: Any) -> DelayedNesterov | Nesterov:
    """Return the outer optimizer. Raise TypeError or ValueError if it does not go with ``quorum``."""
    if quorum is None:
        if outer is not None and not isinstance(outer, DelayedNesterov):
            kind = ValueError if isinstance(outer, Nesterov) else TypeError
            raise kind(f"outer is {outer!r}, wanted None or a pycomm.DelayedNesterov, or a quorum")
        return outer or DelayedNesterov()
    if outer is not None and not isinstance(outer, Nesterov):
        raise ValueError(f"quorum={quorum} with outer={outer!r}: it merges by a pycomm.Nesterov")
    size = checks.environment_count("WORLD_SIZE") if "WORLD_SIZE" in os.environ else 1
    num_ranks = dist.get_world_size() if dist.is_initialized() else size
    if checks.count("quorum", quorum, 1) > num_ranks:
        raise ValueError(f"quorum={quorum} of {num_ranks} ranks")
    return outer or Nesterov()


@dataclass(frozen=True)
class Pace:
    """Checked arguments of :func:`decoupled_sgd`, with the timeout in seconds."""

    every: int
    quorum: int | None
    outer: DelayedNesterov | Nesterov
    method: Compression | None
    timeout: float


class Center:
    """The ranks' common parameters, served by a thread of rank 0."""

    def __init__(
        self, meeting: ServerMeeting, params: Sequence[torch.Tensor], pieces: Sequence[Piece], pace: Pace
    ) -> None:
        dtype = params[0].dtype
        size = sum(piece.size for piece in pieces)
        self._memory = SharedMemory(size * dtype.itemsize)
        copies = [nn.Parameter(p.detach().clone()) for p in params]
        self.shard = ShardOptimizer(
            pace.outer.optimizer(copies, meeting.size), pieces, self._memory.tensor(dtype)[:size]
        )
        rules = AsyncRules() if pace.quorum is None else GraceQuorum(pace.quorum)
        unpackers = None if pace.method is None else Unpackers(params, pace.method, dtype)
        core = Core(self.shard, rules, Compensator(None), dtype, unpackers)
        self._listener = meeting.open_listener()
        ranks = set(range(meeting.size))
        self.serving = Serving(
            core, self._memory, self._listener, rendezvous.host_identity(), ranks, pace.timeout, meeting.rank
        )
        meeting.publish_address(0, self._listener)
        self._timeout = pace.timeout
        self._error: BaseException | None = None
        self._thread = threads.start(self._serve, "pycomm-center", self.serving.stopped.set)

    def _serve(self) -> None:
        try:
            self.serving.run()
        except BaseException as error:  # close() raises it; the ranks' connections end
            self._error = error

    def close(self) -> None:
        """Wait until all ranks have ended. Raise CommError if they have not within the timeout."""
        self._thread.join(self._timeout)
        is_over = not self._thread.is_alive()
        self._listener.close()
        self._memory.close()
        if is_over and self._error is not None:
            raise self._error
        if not is_over:
            what = f"the other ranks have not detached for {self._timeout:g} s"
            raise CommError.during("detach", what, rank=0, elapsed=self._timeout)


class DecoupledAverager(Averager):
    """Handle of :func:`decoupled_sgd`.

    With a rank that is lost, only its steps since its last meeting are lost. Rank 0, which holds the center, must stay.
    """

    def __init__(
        self,
        meeting: ServerMeeting,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, torch.Tensor],
        pace: Pace,
        loop: Loop,
    ) -> None:
        self._params, self._names, self._pace = list(named.values()), list(named), pace
        (pieces,) = cut([p.numel() for p in self._params], 1, anywhere=False)
        self._center = Center(meeting, self._params, pieces, pace) if meeting.rank == 0 else None
        packer = None if pace.method is None else Packer(self._params, pace.method, meeting.worker)
        self._link = ServerLink(0, meeting, pieces, self._params, pace.timeout, packer=packer)
        self._link.open()
        self._num_steps = self._num_meetings = self._since = 0
        self._planned = pace.every
        self._compares, self._numbers = True, list[dict[str, Any]]()
        self._anchors = [torch.empty_like(p) for p in self._params]
        self._pull()
        super().__init__(optimizer, loop)

    def _description(self) -> str:
        pace, center = self._pace, "holds the center" if self._center is not None else "rank 0 holds the center"
        quorum = [] if pace.quorum is None else [f"quorum {pace.quorum}"]
        every = f"every {counted(pace.every, 'step')} of the fastest rank"
        what = [center, tensors_text(self._params), every, *quorum, settings_text(pace.outer), method_text(pace.method)]
        return ", ".join(what)

    # Meetings.

    def _skipped(self) -> None:
        """Compare no more numbers, since a schedule may go on. Contributions are weighted by the steps made."""
        self._compares = False

    def _refused(self, problem: str) -> None:
        """Do nothing: no rank waits for this one."""

    def _stepped(self) -> None:
        self._num_steps += 1
        self._since += 1
        if self._compares and self._num_steps % math.ceil(self._pace.every / _COMPARED) == 0:
            self._numbers.append(self._loop.numbers.at_step(self._num_steps))
        if self._since >= self._planned:
            self.meet()

    @torch.no_grad()
    def meet(self) -> None:
        """Push the change of this rank's parameters, and continue from the center. Not collective.

        At the end, when all ranks have met for the last time, :meth:`take_center` makes them equal.

        Raises:
            CommError: rank 0 is lost, or nothing was merged within the timeout.
            RuntimeError: a parameter of this rank is not finite.
            ValueError: the module or the optimizer has other parameters now, or the numbers of ranks' groups differ.
        """
        self._require_attached()
        if problem := self._loop.tracked.problem():
            raise ValueError(problem)
        if self._since == 0:
            return
        self._link.rate = self._since / max(time.monotonic() - self._begun, 1e-9)
        moved = torch._foreach_sub(self._anchors, self._params)
        if not self._link.load(moved):
            self._link.unload()
            found = zip(self._names, self._params, strict=True)
            name = next((n for n, p in found if not torch.isfinite(p).all()), "a parameter")
            raise RuntimeError(f"{name!r} is not finite, and was not pushed")
        self._link.numbers, self._numbers = self._numbers, []
        self._link.push(self._weight * self._since)
        self._num_meetings += 1
        self._pull()
        share = self._link.rate / max(self._link.fastest, self._link.rate)
        self._planned = max(1, round(self._pace.every * share))

    @torch.no_grad()
    def _pull(self) -> None:
        self._link.ask_to_pull()
        self._link.pull()
        torch._foreach_copy_(self._anchors, self._params)
        self._since, self._begun = 0, time.monotonic()

    def take_center(self) -> None:
        """Overwrite the parameters with the center. The steps since the last meeting are lost."""
        self._require_attached()
        self._pull()

    # What users call.

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks that take part now."""
        return tuple(self._link.stats()["workers"])

    def stats(self) -> dict[str, Any]:
        """Return counters.

        Returns:
            ``steps``, ``meetings``, ``bytes_sent``, ``wait_seconds``, and ``every``, the present number of steps
            between meetings (dynamic local updates). Of the center: ``updates``, and ``staleness``, the number of
            contributions by the number of updates since they were begun (as text).
        """
        stats: dict[str, Any] = {
            "steps": self._num_steps,
            "meetings": self._num_meetings,
            "bytes_sent": self._link.bytes_sent,
            "wait_seconds": self._link.seconds,
            "every": self._planned,
        }
        if self._is_attached:
            found = self._link.stats()
            self._last = {"updates": found["updates"], "staleness": found["staleness"]}
        return {**stats, **self._last}

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters of the last meeting; on rank 0 also the center and the outer optimizer's state."""
        self._require_attached()
        anchors = {name: anchor.clone() for name, anchor in zip(self._names, self._anchors, strict=True)}
        state: dict[str, Any] = {"format": _FORMAT, "since": self._since, "anchors": anchors, "steps": self._num_steps}
        if self._center is not None:
            with self._center.serving.lock:
                found = self._center.shard.state()
                state["center"] = {"memory": found["memory"].clone(), "optimizer": clone_tensors(found["optimizer"])}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned on this rank. The parameters stay as they are.

        Raises:
            ValueError: it is of other parameters, or of another rank. Nothing is changed then.
        """
        self._require_attached()
        mine = {name: anchor.shape for name, anchor in zip(self._names, self._anchors, strict=True)}
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise ValueError("state is not a DecoupledAverager.state_dict()")
        if {name: anchor.shape for name, anchor in state["anchors"].items()} != mine:
            raise ValueError("state is of other parameters")
        if ("center" in state) != (self._center is not None):
            raise ValueError("state is of another rank: rank 0's has the center")
        for name, anchor in zip(self._names, self._anchors, strict=True):
            anchor.copy_(state["anchors"][name])
        self._since, self._begun = int(state["since"]), time.monotonic()
        self._num_steps = int(state.get("steps", 0))
        self._compares = self._compares and "steps" in state  # not in those of older versions
        if self._center is not None:
            with self._center.serving.lock:
                self._center.shard.restore(state["center"]["memory"], clone_tensors(state["center"]["optimizer"]))

    def _release(self) -> None:
        self._link.close()
        if self._center is not None:
            self._center.close()
