"""Gossip: ranks that mix with a few neighbours in each step, and so, over the steps, with all (D-PSGD, push-sum)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycomm import schedule
from pycomm.agreement import agreed
from pycomm.asynchronous.averager import checked_parameters
from pycomm.asynchronous.loop import Known
from pycomm.broadcasting import named_tensors, share_tensors, signature
from pycomm.communicator import Communicator
from pycomm.descriptions import counted, tensors_text
from pycomm.errors import attempt
from pycomm.optim.attached import forget_averaged, register_averaged
from pycomm.optim.module_hooks import watch_copies
from pycomm.optim.parameters import checked_optimizer

_SEGMENT_BYTES = 4 << 20
"""So much is mixed at a time: messages may be buffered only up to a limit, however large the model is."""


def gossip(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    topology: str | Sequence[Any] = "exponential",
    every: int = 1,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
) -> Gossip:
    """Let each rank step by itself, and mix its parameters with a few others' after each ``every`` steps.

    Decentralised parallel SGD (Lian et al., 2017): what a rank sends does not grow with the number of ranks, and nobody
    waits for more than its neighbours. The loop stays ``zero_grad``, ``backward``, ``step``. The ranks' parameters
    differ, but are drawn towards their mean, which mixing does not change. Collective: rank 0's are first copied.

    Args:
        optimizer: any torch optimizer, whose state stays each rank's own.
        model: its parameters must all belong to the optimizer, and be all float32 or all float64, in CPU memory.
        topology: "ring": both neighbours and oneself, a third each. "exponential": half from a rank that is 1, 2, 4,
            ... ranks away, in turns (Assran et al., 2019). "random": in pairs, of which 64 drawings take turns. Or a
            matrix of weights, or several that take turns: ``w[i][j]`` is what rank i takes of rank j's. Columns must
            sum to 1. If rows do not, what is mixed is weighed by push-sum, so that the ranks still come to their mean.
            Whatever it is, :func:`pycomm.schedule.verify` proves it.
        every: number of steps from one mixing to the next; equal on all ranks, which must make equally many.
        seed: of "random".
        process_group: the ranks; the default group if ``None``.
        timeout: limit of every wait for a peer; seconds or ``timedelta``. ``None``: the process group's own.

    Raises:
        TypeError, ValueError: an argument is wrong: weights that are negative, or whose columns do not sum to 1, or by
            which some ranks never hear of others; or the ranks differ. On every rank.
        CommError: a rank did not come. ``optimizer.step()`` raises it, too, if a neighbour is lost, or has got one.
    """
    communicator = Communicator(process_group, timeout)
    try:

        def checked() -> tuple[torch.optim.Optimizer, dict[str, torch.Tensor], schedule.Mixing]:
            inner = checked_optimizer(optimizer, model, "gossip")
            named = checked_parameters(inner, model, every, call="gossip()")
            kind = next(iter(named.values())).device.type
            if kind != "cpu":
                raise ValueError(f"parameters are on {kind}, wanted CPU memory")
            mixing = schedule.mixing(topology, communicator.size, seed)
            schedule.verify(mixing)
            return inner, named, mixing

        def lines(found: tuple[object, dict[str, torch.Tensor], schedule.Mixing]) -> dict[str, list[str]]:
            _, named, mixing = found
            parameters = [f"{name}: {signature(p)}" for name, p in named.items()]
            return {"setting": [f"topology={mixing.name}", f"every={every}"], "parameter": parameters}

        gather = communicator.channel.all_gather_bytes
        optimizer, named, mixing = agreed(gather, attempt(checked), "gossip", lines)
        share_tensors(communicator, named_tensors(model), src=0)
        known = Known(model, optimizer, named, "gossip()")
        return Gossip(communicator, optimizer, known, mixing, every)
    except BaseException:
        communicator.close()
        raise


class Gossip:
    """Handle of :func:`gossip`, kept alive by the optimizer's hook."""

    def __init__(
        self,
        communicator: Communicator,
        optimizer: torch.optim.Optimizer,
        known: Known,
        mixing: schedule.Mixing,
        every: int,
    ) -> None:
        params = list(known.named.values())
        self._communicator, self._params, self._mixing, self._every = communicator, params, mixing, every
        self._known = known
        # Push-sum: the parameters are what is mixed, divided by a mass, its last element, which starts as 1. It is
        # mixed with them, and so rounded as they are: also where weights like 1/3, rounded, do not quite sum to 1.
        flat = [p.detach().reshape(-1) for p in params]
        self._mixed = torch.cat([*flat, torch.ones(1, dtype=flat[0].dtype)])
        parts = torch.split(self._mixed[:-1], [p.numel() for p in params])
        self._parts = [part.view(p.shape) for part, p in zip(parts, params, strict=True)]
        self._segments = torch.split(self._mixed, _SEGMENT_BYTES // self._mixed.itemsize)
        self._incoming = torch.empty_like(self._segments[0])
        self._num_steps = self._num_mixings = self._bytes = 0
        self._seconds = 0.0
        self._hook: Any = optimizer.register_step_post_hook(self._stepped)
        self._copies = watch_copies(known.model)
        register_averaged(known)

    def __repr__(self) -> str:
        if self._hook is None:
            return "Gossip(detached)"
        ranks, every = counted(self._communicator.size, "rank"), counted(self._every, "step")
        what = [ranks, self._communicator.transport, tensors_text(self._params), self._mixing.name, f"every {every}"]
        return f"Gossip({', '.join(what)})"

    def _stepped(self, *_: object) -> None:
        self._num_steps += 1
        if self._num_steps % self._every == 0:
            start = time.perf_counter()
            self.mix()
            self._seconds += time.perf_counter() - start

    @torch.no_grad()
    def mix(self) -> None:
        """Mix with this round's neighbours. All ranks must.

        Raises:
            CommError: a neighbour is lost. This rank's neighbours are told, as it can mix no more.
            ValueError: this rank's parameters are no longer those of module and optimizer. Likewise.
        """
        self._require_attached()
        try:
            if problem := self._known.problem():
                raise ValueError(problem)
            self._catch_up()
            receivers, kept, sources = self._mixing.round_at(self._num_mixings).part_of(self._communicator.rank)
            for segment in self._segments:
                self._mix_segment(segment, receivers, kept, sources)
        except BaseException as error:  # some of it may be mixed, and some not
            self._communicator.close(f"its mixing failed: {error}")
            raise
        self._num_mixings += 1
        self._show()

    def _mix_segment(
        self, segment: torch.Tensor, receivers: list[int], kept: float, sources: list[tuple[int, float]]
    ) -> None:
        tag = self._num_mixings % (1 << 29)
        for peer in receivers:  # this copies it
            self._communicator.send(segment, peer, tag)
            self._bytes += segment.nbytes
        segment.mul_(kept)
        incoming = self._incoming[: len(segment)]
        for peer, weight in sources:
            self._communicator.recv(incoming, peer, tag)
            segment.add_(incoming, alpha=weight)

    def _catch_up(self) -> None:
        """Add to what is mixed the steps that were made since: on the parameters, p = part / mass, not on it."""
        before = 1 - 1 / float(self._mixed[-1])  # part + (p - part / mass)
        for part, p in zip(self._parts, self._params, strict=True):
            torch.add(p, part, alpha=before, out=part)

    def _show(self) -> None:
        mass = float(self._mixed[-1])
        for part, p in zip(self._parts, self._params, strict=True):
            torch.div(part, mass, out=p)

    @torch.no_grad()
    def average(self) -> None:
        """Make the mean of all ranks' parameters everybody's: in the end, or before an evaluation. Collective."""
        self._require_attached()
        self._catch_up()
        self._communicator.all_reduce(self._mixed, "mean")
        self._mixed /= float(self._mixed[-1])
        self._show()

    def stats(self) -> dict[str, Any]:
        """Return ``steps``, ``mixings``, ``bytes_sent`` and ``wait_seconds``, those of mixing."""
        return {
            "steps": self._num_steps,
            "mixings": self._num_mixings,
            "bytes_sent": self._bytes,
            "wait_seconds": self._seconds,
        }

    def detach(self) -> None:
        """Mix no more; release the communicator. Idempotent, not collective."""
        if self._hook is not None:
            forget_averaged(self._known)
            self._hook.remove()
            self._hook = None
            self._copies.remove()
            self._communicator.close(f"it has ended its training (detach) after step {self._num_steps}")

    def _require_attached(self) -> None:
        if self._hook is None:
            raise RuntimeError("this Gossip is detached")
