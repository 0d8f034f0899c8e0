"""Decoupled averaging: ranks of different speed hand in how far they have gone, and go on from the center."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pycomm import threads
from pycomm.asynchronous.averager import Averager
from pycomm.asynchronous.compensation import Compensator
from pycomm.asynchronous.core import Core
from pycomm.asynchronous.loop import Loop
from pycomm.asynchronous.memory import SharedMemory
from pycomm.asynchronous.modes import Async, GraceQuorum
from pycomm.asynchronous.outer import DelayedNesterov, Nesterov
from pycomm.asynchronous.packing import Packer, Unpackers
from pycomm.asynchronous.server_meeting import ServerMeeting
from pycomm.asynchronous.serving import Serving
from pycomm.asynchronous.shards import Piece, cut
from pycomm.asynchronous.updates import ShardOptimizer
from pycomm.asynchronous.worker import ServerLink
from pycomm.compression import Compression
from pycomm.descriptions import counted, settings_text, tensors_text
from pycomm.errors import CommError
from pycomm.reducer.description import method_text
from pycomm.transport import rendezvous

_FORMAT = 1


@dataclass(frozen=True)
class Pace:
    """How ranks of different speed meet.

    Attributes:
        every: number of steps of the fastest rank from one meeting to its next; others make as many as take as long.
        quorum: ranks that a merge wants; ``None``: each contribution is merged by itself, when it comes.
        outer: what merges.
        method: by which contributions travel, if not as they are.
        timeout: limit of every wait, in seconds.
    """

    every: int
    quorum: int | None
    outer: DelayedNesterov | Nesterov
    method: Compression | None
    timeout: float


class Center:
    """Center of the ranks: what they have in common, held by a thread of rank 0, which serves it to all."""

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
        mode = Async() if pace.quorum is None else GraceQuorum(pace.quorum)
        unpackers = None if pace.method is None else Unpackers(params, pace.method, dtype)
        core = Core(self.shard, mode, Compensator(None), dtype, unpackers)
        self._listener = meeting.open_listener()
        ranks = set(range(meeting.size))
        self.serving = Serving(
            core, self._memory, self._listener, rendezvous.host_identity(), ranks, pace.timeout, meeting.rank
        )
        meeting.tell_address(0, self._listener)
        self._timeout = pace.timeout
        self._error: BaseException | None = None
        self._thread = threads.start(self._serve, "pycomm-center", self.serving.stopped.set)

    def _serve(self) -> None:
        try:
            self.serving.run()
        except BaseException as error:  # raised by close(); the ranks learn that nobody serves them
            self._error = error

    def close(self) -> None:
        """Wait until all ranks have ended.

        Raises:
            CommError: they have not within the timeout.
        """
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
    """Averager of ranks of different speed, none of which waits for all (``DelayedNesterov``, or a quorum).

    A rank that is lost costs what it did since its last meeting; but rank 0, which holds the center, must stay.
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
        host, access = rendezvous.host_identity(), meeting.access
        packer = None if pace.method is None else Packer(self._params, pace.method, meeting.worker)
        self._link = ServerLink(
            *(0, meeting.worker, pieces, self._params, lambda: meeting.address_of(0), access, host, pace.timeout, ""),
            packer,
        )
        self._link.open()
        self._num_steps = self._num_meetings = self._since = 0
        self._planned = pace.every
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
        """Do nothing: contributions count by the steps that were made."""

    def _refused(self, problem: str) -> None:
        """Do nothing: nobody waits for this rank."""

    def _stepped(self) -> None:
        self._num_steps += 1
        self._since += 1
        if self._since >= self._planned:
            self.meet()

    @torch.no_grad()
    def meet(self) -> None:
        """Hand in how far this rank has gone, and go on from the center. Not collective.

        In the end, when all ranks have met for the last time, :meth:`take_center` makes them equal.

        Raises:
            CommError: rank 0 is lost, or nothing was merged within the timeout.
            RuntimeError: a parameter of this rank is not finite.
            ValueError: its parameters are no longer those of module and optimizer.
        """
        self._require_attached()
        if problem := self._loop.known.problem():
            raise ValueError(problem)
        if self._since == 0:
            return
        self._link.rate = self._since / max(time.monotonic() - self._begun, 1e-9)
        moved = torch._foreach_sub(self._anchors, self._params)
        if not self._link.load(moved):
            self._link.unload()
            found = zip(self._names, self._params, strict=True)
            name = next((n for n, p in found if not torch.isfinite(p).all()), "a parameter")
            raise RuntimeError(f"{name!r} is not finite, and was not handed in")
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
        """Overwrite the parameters with the center; what was done since the last meeting is lost."""
        self._require_attached()
        self._pull()

    # What users call.

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks that take part now."""
        return tuple(self._link.stats()["workers"])

    def set_weight(self, num_samples: float) -> None:
        """Count so many samples or tokens for each of this rank's steps from now on; 1 at first.

        Raises:
            TypeError, ValueError: ``num_samples`` is not a positive number.
        """
        super().set_weight(num_samples)

    def stats(self) -> dict[str, Any]:
        """Return counters.

        Returns:
            ``steps``, ``meetings``, ``bytes_sent``, ``wait_seconds``; ``every``, the number of steps to the next
            meeting (dynamic local updates); and of the center ``updates``, and ``staleness``: contributions by the
            updates that it has had since they were begun, as text.
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
        """Return what this rank had at its last meeting; on rank 0 with the center and the outer optimizer's state."""
        self._require_attached()
        anchors = {name: anchor.clone() for name, anchor in zip(self._names, self._anchors, strict=True)}
        state: dict[str, Any] = {"format": _FORMAT, "since": self._since, "anchors": anchors}
        if self._center is not None:
            with self._center.serving.lock:
                found = self._center.shard.state()
                state["center"] = {"memory": found["memory"].clone(), "optimizer": _copied(found["optimizer"])}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned on this rank. The parameters stay as they are.

        Raises:
            ValueError: it is of other parameters, or of another rank; nothing is changed then.
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
        if self._center is not None:
            with self._center.serving.lock:
                self._center.shard.take_back(state["center"]["memory"], _copied(state["center"]["optimizer"]))

    def detach(self) -> None:
        """Meet no more. On rank 0, return when all other ranks have detached, too. Idempotent.

        Raises:
            CommError: on rank 0, they have not within the timeout.
        """
        super().detach()

    def _release(self) -> None:
        self._link.close()
        if self._center is not None:
            self._center.close()


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value.clone() if isinstance(value, torch.Tensor) else value
