"""Averaging less often: ranks step independently and meet every N steps (local SGD, DiLoCo, EASGD)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pycomm import checks
from pycomm.agreement import agreed
from pycomm.collectives.broadcasting import named_tensors, share_tensors
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.transport.authentication import secret
from pycomm.collectives.transport.choice import version
from pycomm.collectives.transport.own_group import timeout_seconds
from pycomm.compression.base import Compression
from pycomm.compression.dense import NoCompression
from pycomm.errors import attempt
from pycomm.optim.parameters import checked_optimizer
from pycomm.optim.step_override import stepper_of
from pycomm.torch_internals import by_plain_names
from pycomm.training.asynchronous.arguments import (
    check_outer,
    checked_parameters,
    checked_per_rank,
    lines_of,
    met_once,
    named_method,
)
from pycomm.training.asynchronous.buffers import MeetingBuffers
from pycomm.training.asynchronous.elastic_group import ElasticGroup, Lines
from pycomm.training.asynchronous.fragment import Elastic, Fragment, Nesterov, Outer
from pycomm.training.asynchronous.local_averager import LocalAverager, MeetingSchedule
from pycomm.training.asynchronous.loop import Loop, TrackedParameters
from pycomm.training.reducer import Ignored, checked_buffers


def local_sgd(  # noqa: PLR0913  # all of it is one meeting
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    every: int,
    outer: Nesterov | Elastic | None = None,
    fragments: int = 1,
    delay: int = 0,
    compression: Compression | str | None = None,
    on_failure: str = "raise",
    join: str | None = None,
    buffers: str = "local",
    per_rank: Iterable[str] = (),
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
) -> LocalAverager:
    """Let each rank step independently, and average the parameters over the ranks after every ``every`` steps.

    The loop stays ``zero_grad``, ``backward``, ``step``: ranks meet at the end of ``optimizer.step()``. Each rank
    keeps its own optimizer state. Collective: rank 0's parameters are first copied to all ranks. Do not wrap the
    model, and do not ``attach`` the optimizer as well.

    Args:
        optimizer: any torch optimizer.
        model: its parameters must all belong to the optimizer, and be all float64, or float32 and half types, on one
            device. Half-precision ones are averaged in float32, with 8 bytes per parameter, and 4 more for outer
            momentum; in their place their masters, if :func:`pycomm.master_weights` keeps some.
        every: number of steps between meetings; the same on all ranks, which must all make equally many steps.
        outer: how the mean is applied. ``None``: it becomes the parameters (local SGD; with ``attach`` for the first
            steps and then ``detach()``, post-local SGD). ``pycomm.Nesterov()``: DiLoCo. ``pycomm.Elastic()``: the ranks
            stay different, and are pulled towards a common center (EASGD); without ``delay`` and ``compression``.
        fragments: number of parts of about equal size, which meet in turns, each of them every ``every`` steps. The
            same bytes then travel in smaller portions (Douillard et al., "Streaming DiLoCo", 2025).
        delay: number of steps, below ``every``, that ranks make while a mean is being computed. The result is then
            mixed half and half with the parameters of that moment (same paper, section 3.2). 0: ranks wait.
        compression: method, an object or a name such as "fp16", by which the change of the parameters travels. Its
            residual is added at the next meeting.
        on_failure: what happens when a rank dies, stops or does not come within the timeout. "raise":
            ``optimizer.step()`` raises a CommError on the others. "shrink": the others repeat the meeting without it
            and continue, and new ranks may join. "shrink" requires CPU memory, and with a ``delay`` another copy of
            the parameters.
        join: address, "host:port" or "[::1]:port", of the store of a running group. This process joins it after its
            next meeting: it does not call ``init_process_group``, takes the group's parameters, and keeps the state
            of its own ``optimizer``. Requires "shrink" on all ranks.
        buffers: treatment of the module's buffers (BatchNorm's statistics, for example) in each meeting. "local": each
            rank keeps its own, and the log names one once if they differ. "average": floating-point buffers become
            their mean, without weights, and all others the lowest rank's. "broadcast": all become the lowest rank's.
            Buffers with equal bits on all ranks are not written. With a ``delay``, values from its beginning are sent.
        per_rank: keys of parameter groups, such as "lr", whose numbers may differ between ranks. All others are
            compared in each meeting, except those that the optimizer itself changes. Also names of buffers that stay
            each rank's own, or patterns ("*.running_mean").
        process_group: the ranks; the default group if ``None``.
        timeout: limit of every wait for a peer; seconds or ``timedelta``. ``None``: the process group's own.

    Raises:
        TypeError, ValueError: an argument is wrong, or arguments or names, shapes or dtypes of parameters differ
            between ranks: on every rank. From ``optimizer.step()``: ``model`` or ``optimizer`` has other parameters
            now, or hyperparameters differ between ranks.
        CommError: a rank did not come. ``optimizer.step()`` raises it, too, if one is lost.
        RuntimeError: from ``optimizer.step()``, on every rank: a parameter or averaged buffer is not finite; or ranks
            have made different numbers of steps, or one has left out a batch (see ``skip_step`` of the handle).
    """
    given = dict[str, Any](fragments=fragments, delay=delay, compression=compression, on_failure=on_failure)
    given["buffers"] = buffers
    checked = partial(_checked, optimizer, model, outer, every, per_rank, **given)
    if join is not None and (not dist.is_initialized() or isinstance(join, str)):  # alone, without the ranks
        return _join(checked(join=join), join, timeout)
    return _average(partial(checked, join=join), process_group, timeout)


@dataclass(frozen=True)
class _Settings:
    """Checked arguments."""

    optimizer: torch.optim.Optimizer
    model: torch.nn.Module
    outer: Outer
    method: Compression
    schedule: MeetingSchedule
    survives: bool
    named: dict[str, torch.Tensor]
    buffers: str
    own: Ignored

    def lines(self) -> Lines:
        """Return what must be the same on all ranks."""
        settings = [
            *(f"every={self.schedule.every}", f"delay={self.schedule.delay}", f"fragments={len(self.schedule.turns)}"),
            *(f"per_rank={list(self.own.patterns)}", f"outer={self.outer!r}", f"compression={self.method!r}"),
            *(f"on_failure shrinks: {self.survives}", f"buffers={self.buffers!r}"),
            f"master weights: {stepper_of(self.optimizer).has_masters}",
        ]
        return [
            ("the version of pycomm", version()),
            ("the optimizer", type(self.optimizer).__name__),
            *(("setting", line) for line in settings),
            *(("parameter", line) for line in lines_of(self.named, "local_sgd()")),
        ]

    def averager(self, communicator: Communicator, group: ElasticGroup | None) -> LocalAverager:
        """Create the handle, once the ranks have agreed."""
        keeps = self.survives and self.schedule.delay > 0
        parts = _split(met_once(self.named, "local_sgd()"), len(self.schedule.turns))
        buffers = MeetingBuffers(self.model, self.buffers, communicator, self.own, "local_sgd")
        fragments = [Fragment(part, self.outer, self.method, keeps, self.optimizer, communicator) for part in parts]
        loop = Loop(TrackedParameters(self.model, self.optimizer, self.named, "local_sgd()"), self.own)
        return LocalAverager(communicator, self.optimizer, fragments, self.schedule, group, buffers, loop)


def _checked(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    outer: Any,
    every: Any,
    per_rank: Any,
    *,
    fragments: Any = 1,
    delay: Any = 0,
    compression: Any = None,
    on_failure: Any = "raise",
    join: Any = None,
    buffers: Any = "local",
) -> _Settings:
    optimizer = checked_optimizer(optimizer, model, "local_sgd")
    if outer is not None and not isinstance(outer, Nesterov | Elastic):
        raise TypeError(f"outer is {outer!r}, wanted None, a pycomm.Nesterov or a pycomm.Elastic")
    named = checked_parameters(optimizer, model, every, fragments)
    if checks.count("delay", delay, 0) >= every:
        raise ValueError(f"delay={delay}, wanted less than every={every}: the next meeting would begin before that")
    method = named_method(compression) or NoCompression()
    check_outer(method, outer)
    if isinstance(outer, Elastic) and delay > 0:
        raise ValueError(f"delay={delay} with outer={outer!r}, wanted 0: ranks and center are pulled at the same time")
    if isinstance(outer, Elastic) and not isinstance(method, NoCompression):
        why = "ranks stay apart, so what a method leaves out would be sent twice"
        raise ValueError(f"compression={method!r} with outer={outer!r}, wanted None: {why}")
    if on_failure not in ("raise", "shrink"):
        raise ValueError(f'on_failure is {on_failure!r}, wanted "raise" or "shrink"')
    survives = on_failure == "shrink"
    if survives and next(iter(named.values())).device.type != "cpu":
        raise ValueError('on_failure="shrink" requires parameters in CPU memory')
    if survives:
        secret()  # newcomers authenticate with it: a malformed one is reported to all ranks
    if join is not None and not isinstance(join, str):
        raise TypeError(f"join is {checks.shown(join)}, wanted an address, or None")
    if join is not None and not survives:
        raise ValueError('join requires on_failure="shrink", which the present ranks use')
    schedule = MeetingSchedule(every, delay, tuple(every * (i + 1) // fragments for i in range(fragments)))
    own = checked_per_rank(per_rank, optimizer, model)
    buffers = checked_buffers(buffers, model)
    return _Settings(optimizer, model, outer, method, schedule, survives, by_plain_names(model, named), buffers, own)


def _average(
    checked: Callable[[], _Settings], process_group: dist.ProcessGroup | None, timeout: timedelta | float | None
) -> LocalAverager:
    communicator = Communicator(process_group, timeout)
    try:

        def compared(settings: _Settings) -> dict[str, list[str]]:
            lines = settings.lines()
            return {kind: [text for what, text in lines if what == kind] for kind, _ in lines}

        settings = agreed(communicator.channel.all_gather_bytes, attempt(checked), lines=compared)
        lines = settings.lines()
        stepper = stepper_of(settings.optimizer)
        masters = {f"master {number}": master for number, master in enumerate(stepper.masters())}
        shared = {name: x for name, x in named_tensors(settings.model).items() if not settings.own.covers(x)}
        share_tensors(communicator, shared | masters, src=0)
        stepper.restore()
        stepper.warn_of_lost_updates(settings.named)
        group = ElasticGroup.found(communicator, lines) if settings.survives else None
        return settings.averager(communicator, group)
    except BaseException:
        communicator.close()
        raise


def _join(settings: _Settings, address: str, timeout: timedelta | float | None) -> LocalAverager:
    group = ElasticGroup.join(address, settings.lines(), timeout_seconds(timeout))
    made: LocalAverager | None = None
    try:
        made = settings.averager(group.communicator, group)
        made.share_state(is_newcomer=True)
        return made
    except BaseException:
        if made is not None:
            made.detach()
        group.close("it could not join")
        group.communicator.close()
        raise


def _split(named: Mapping[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Return ``named``, in its order, in ``count`` groups of about equal size. None is empty."""
    groups: list[dict[str, torch.Tensor]] = []
    left = sum(p.numel() for p in named.values())
    rest = list(named.items())
    for number in range(count, 0, -1):
        group = [rest.pop(0)]
        size = group[0][1].numel()
        while len(rest) >= number and (number == 1 or size + rest[0][1].numel() / 2 <= left / number):
            size += rest[0][1].numel()
            group.append(rest.pop(0))
        groups.append(dict(group))
        left -= size
    return groups
