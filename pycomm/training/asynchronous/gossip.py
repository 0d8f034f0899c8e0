"""Gossip: each rank mixes its parameters with a few neighbors, and over several rounds with all (D-PSGD, push-sum)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pycomm import schedule
from pycomm.agreement import agreed
from pycomm.collectives.broadcasting import named_tensors, share_tensors
from pycomm.collectives.communicator import Communicator
from pycomm.descriptions import counted, tensors_text
from pycomm.errors import attempt
from pycomm.optim.parameters import checked_optimizer
from pycomm.training.asynchronous.arguments import (
    checked_parameters,
    checked_per_rank,
    lines_of,
    met_once,
    name_of_not_finite,
)
from pycomm.training.asynchronous.buffers import MeetingBuffers
from pycomm.training.asynchronous.loop import Loop, TrackedParameters
from pycomm.training.reducer import checked_buffers
from pycomm.training.reductions.record import Record

_SEGMENT_BYTES = 4 << 20
"""Bytes mixed at a time, so that buffered messages stay small for any model."""


def gossip(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    topology: str | Sequence[Any] = "exponential",
    every: int = 1,
    seed: int = 0,
    buffers: str = "local",
    per_rank: Iterable[str] = (),
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
) -> Gossip:
    """Let each rank step independently, and mix its parameters with a few others' after each ``every`` steps.

    Decentralized parallel SGD (Lian et al., 2017): the bytes a rank sends do not grow with the number of ranks, and a
    rank waits for its neighbors only. The loop stays ``zero_grad``, ``backward``, ``step``. The ranks' parameters
    differ, but mixing draws them towards their mean without changing it. Collective: rank 0's parameters are first
    copied to all ranks.

    Args:
        optimizer: any torch optimizer; each rank keeps its own state.
        model: its parameters must all belong to the optimizer, and be all float32 or all float64, in CPU memory.
        topology: "ring": a third each from both neighbors and this rank. "exponential": half from a rank that is 1,
            2, 4, ... ranks away, in turns (Assran et al., 2019). "random": pairs, from 64 random pairings in turns. Or
            a matrix of weights, or several that take turns, where ``w[i][j]`` is rank i's weight for rank j's
            parameters. Columns must sum to 1. If rows do not, push-sum corrects the weights, so that the ranks still
            approach their mean. :func:`pycomm.schedule.verify` proves every topology.
        every: number of steps between mixings; the same on all ranks, which must all make equally many steps.
        seed: seed of "random".
        buffers: as for :func:`local_sgd`. For "average" and "broadcast" all ranks meet in each mixing, and get the same
            buffers. For "local" they are compared in mixings 1, 2, 4, 8, ...
        per_rank: keys of parameter groups whose numbers may differ between ranks, or names of buffers, as for
            :func:`local_sgd`.
        process_group: the ranks; the default group if ``None``.
        timeout: limit of every wait for a peer; seconds or ``timedelta``. ``None``: the process group's own.

    Raises:
        TypeError, ValueError: on every rank: an argument is wrong (weights are negative, columns do not sum to 1, or
            some ranks are never mixed with others), or the ranks differ. From ``optimizer.step()`` or a forward:
            ``model`` or ``optimizer`` has other parameters now. From ``optimizer.step()``: a neighbor's optimizer has
            another learning rate, or another number of its groups.
        RuntimeError: from ``optimizer.step()``: this rank or a neighbor has left out a batch that the other has not;
            or a parameter of this rank is not finite. The others get a CommError then, which names it and the rank.
        CommError: a rank did not come. ``optimizer.step()`` raises it, too, if a neighbor is lost or has failed.
    """
    communicator = Communicator(process_group, timeout)
    try:
        check = partial(_checked, optimizer, model, topology, every, seed, buffers, per_rank, communicator.size)
        lines = partial(_settings_of, every, buffers)
        loop, mixing = agreed(communicator.channel.all_gather_bytes, attempt(check), "gossip", lines)
        shared = {name: x for name, x in named_tensors(model).items() if not loop.per_rank.covers(x)}
        share_tensors(communicator, shared, src=0)
        synced = MeetingBuffers(model, buffers, communicator, loop.per_rank, "gossip")
        return Gossip(communicator, loop, mixing, every, synced)
    except BaseException:
        communicator.close()
        raise


def _checked(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    topology: str | Sequence[Any],
    every: int,
    seed: int,
    buffers: str,
    per_rank: Iterable[str],
    num_ranks: int,
) -> tuple[Loop, schedule.Mixing]:
    """Return the loop and schedule of this rank; raise TypeError or ValueError if an argument is wrong."""
    inner = checked_optimizer(optimizer, model, "gossip")
    named = checked_parameters(inner, model, every, call="gossip()")
    kind = next(iter(named.values())).device.type
    if kind != "cpu":
        raise ValueError(f"parameters are on {kind}, wanted CPU memory")
    mixing = schedule.mixing(topology, num_ranks, seed)
    schedule.verify(mixing)
    checked_buffers(buffers, model)
    own = checked_per_rank(per_rank, inner, model)
    return Loop(TrackedParameters(model, inner, named, "gossip()"), own), mixing


def _settings_of(every: int, buffers: str, found: tuple[Loop, schedule.Mixing]) -> dict[str, list[str]]:
    """Return what must be equal on all ranks."""
    loop, mixing = found
    parameters = lines_of(loop.tracked.named, "gossip()")
    settings = [
        f"topology={mixing.name}",
        f"every={every}",
        f"per_rank={loop.per_rank.patterns}",
        f"buffers={buffers!r}",
    ]
    return {"the optimizer": [type(loop.tracked.optimizer).__name__], "setting": settings, "parameter": parameters}


class Gossip:
    """Handle of :func:`gossip`, kept alive by the optimizer's hook."""

    def __init__(
        self, communicator: Communicator, loop: Loop, mixing: schedule.Mixing, every: int, buffers: MeetingBuffers
    ) -> None:
        self._names, params = zip(*met_once(loop.tracked.named, "gossip()").items(), strict=True)
        self._buffers = buffers
        self._communicator, self._params, self._mixing, self._every = communicator, params, mixing, every
        self._loop, self._is_attached = loop, True
        # Push-sum: the last element is a mass that starts as 1 and is mixed like the others; the parameters are the
        # other elements divided by it. So this is exact also for weights such as 1/3, whose rounded sum is not 1.
        flat = [p.detach().reshape(-1) for p in params]
        self._mixed = torch.cat([*flat, torch.ones(1, dtype=flat[0].dtype)])
        parts = torch.split(self._mixed[:-1], [p.numel() for p in params])
        self._parts = [part.view(p.shape) for part, p in zip(parts, params, strict=True)]
        self._segments = torch.split(self._mixed, _SEGMENT_BYTES // self._mixed.itemsize)
        self._incoming = torch.empty_like(self._segments[0])
        self._num_steps = self._num_mixings = self._bytes = 0
        self._seconds = 0.0
        self._record = Record(loop.source())
        loop.watch(self._stepped, self._skipped, self._refused)

    def __repr__(self) -> str:
        if not self._is_attached:
            return "Gossip(detached)"
        ranks, every = counted(self._communicator.size, "rank"), counted(self._every, "step")
        what = [ranks, self._communicator.transport, tensors_text(self._params), self._mixing.name, f"every {every}"]
        return f"Gossip({', '.join(what)})"

    def _skipped(self) -> None:
        """Count a step that a loss scaler skips: the other ranks make it."""
        self._stepped()

    def skip_step(self) -> None:
        """Skip this step, because its batch cannot be used. Call it in place of the rest of the step, which counts."""
        self._require_attached()
        self._loop.exclude_counts()
        self._stepped()

    def _refused(self, problem: str) -> None:
        self._communicator.close(f"its mixing failed: {problem}")

    def _stepped(self) -> None:
        self._num_steps += 1
        if self._num_steps % self._every == 0:
            start = time.perf_counter()
            self.mix()
            self._seconds += time.perf_counter() - start

    @torch.no_grad()
    def mix(self) -> None:
        """Mix with this round's neighbors. Collective.

        After an error this rank can mix no more, and its neighbors get a CommError.

        Raises:
            CommError: a neighbor is lost.
            ValueError: the module or the optimizer has other parameters now, or a neighbor's optimizer other numbers.
            RuntimeError: a neighbor, or this rank, has left out a batch; or a parameter of this rank is not finite.
        """
        self._require_attached()
        try:
            if problem := self._loop.tracked.problem():
                raise ValueError(problem)
            mine = self._record.details(self._record.read(), steps_made=[self._num_steps, 0])
            self._loop.restart()
            if name := self._not_finite(self._params):
                raise RuntimeError(f"{name!r} is not finite on rank {self._communicator.rank}: nothing was mixed")
            receivers, kept, sources = self._mixing.round_at(self._num_mixings).part_of(self._communicator.rank)
            self._compare(mine, receivers, sources)
            # In mode "local" all ranks wait for each other seldom: in mixings 1, 2, 4, 8, ...
            is_due = self._buffers.mode != "local" or self._num_mixings & (self._num_mixings + 1) == 0
            values = self._buffers.exchange(self._buffers.begin()) if is_due else {}
            self._catch_up()
            for segment in self._segments:
                self._mix_segment(segment, receivers, kept, sources)
            if name := self._not_finite(self._parts):
                raise RuntimeError(f"{name!r} is finite, but too large to be mixed on rank {self._communicator.rank}")
        except BaseException as error:  # some segments may be mixed, and others not
            self._communicator.close(f"its mixing failed: {error}")
            raise
        self._num_mixings += 1
        self._show()
        self._buffers.apply(values)

    def _not_finite(self, tensors: Iterable[torch.Tensor]) -> str:
        """Return the name of the first tensor that is not finite; the sum is quicker, but may overflow."""
        named = zip(self._names, tensors, strict=True)
        return next((name for name, x in named if not x.sum().isfinite() and not x.isfinite().all()), "")

    @property
    def _tag(self) -> int:
        return self._num_mixings % (1 << 29)

    def _compare(self, mine: bytes, receivers: list[int], sources: list[tuple[int, float]]) -> None:
        """Raise RuntimeError or ValueError if a neighbor left out a batch, or its optimizer has other numbers."""
        tag = self._tag
        for peer in receivers:
            self._communicator.send(np.array([len(mine)]), peer, tag)
            self._communicator.send(np.frombuffer(mine, np.uint8), peer, tag)
        for peer, _ in sources:
            self._communicator.recv(size := np.empty(1, np.int64), peer, tag)
            self._communicator.recv(theirs := np.empty(int(size[0]), np.uint8), peer, tag)
            if theirs.tobytes() != mine:
                texts = {self._communicator.rank: mine, peer: theirs.tobytes()}
                self._record.explain(self._record.parsed({rank: texts[rank] for rank in sorted(texts)}))

    def _mix_segment(
        self, segment: torch.Tensor, receivers: list[int], kept: float, sources: list[tuple[int, float]]
    ) -> None:
        tag = self._tag
        for peer in receivers:  # this copies it
            self._communicator.send(segment, peer, tag)
            self._bytes += segment.nbytes
        segment.mul_(kept)
        incoming = self._incoming[: len(segment)]
        for peer, weight in sources:
            self._communicator.recv(incoming, peer, tag)
            segment.add_(incoming, alpha=weight)

    def _catch_up(self) -> None:
        """Add the steps since the last mixing: part becomes part + (p - part / mass)."""
        before = 1 - 1 / float(self._mixed[-1])
        for part, p in zip(self._parts, self._params, strict=True):
            torch.add(p, part, alpha=before, out=part)

    def _show(self) -> None:
        mass = float(self._mixed[-1])
        for part, p in zip(self._parts, self._params, strict=True):
            torch.div(part, mass, out=p)

    @torch.no_grad()
    def average(self) -> None:
        """Set all ranks' parameters to their mean, at the end or before an evaluation. Collective."""
        self._require_attached()
        values = self._buffers.exchange(self._buffers.begin())
        if any(self._communicator.channel.all_gather_number(bool(self._not_finite(self._params)))):
            why = name_of_not_finite(self._communicator, self._loop.tracked.named.items())
            raise RuntimeError(f"the parameters of the ranks have no mean: {why}")
        self._catch_up()
        self._communicator.all_reduce(self._mixed, "mean")
        if name := self._not_finite(self._parts):  # on all ranks
            raise RuntimeError(f"{name!r} has no mean: it is finite, but too large to be added")
        self._mixed /= float(self._mixed[-1])
        self._show()
        self._buffers.apply(values)

    def stats(self) -> dict[str, Any]:
        """Return ``steps``, ``mixings``, ``bytes_sent`` of parameters, and ``wait_seconds``, the time spent mixing."""
        return {
            "steps": self._num_steps,
            "mixings": self._num_mixings,
            "bytes_sent": self._bytes,
            "wait_seconds": self._seconds,
        }

    def detach(self) -> None:
        """End the mixing, and release the communicator. Idempotent, not collective."""
        if self._is_attached:
            self._is_attached = False
            self._loop.close()
            self._buffers.close()
            self._communicator.close(f"it has ended its training (detach) after step {self._num_steps}")

    def _require_attached(self) -> None:
        if not self._is_attached:
            raise RuntimeError("this Gossip is detached")
