"""Averaging less often: ranks step by themselves, and meet every so many steps (local SGD, DiLoCo, EASGD)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycomm import checks
from pycomm.asynchronous.averager import Averager
from pycomm.asynchronous.decoupled import DecoupledAverager, Pace
from pycomm.asynchronous.elastic_group import ElasticGroup, Lines
from pycomm.asynchronous.fragment import Fragment, Outer
from pycomm.asynchronous.local_averager import LocalAverager, Rhythm
from pycomm.asynchronous.loop import Known, Loop
from pycomm.asynchronous.outer import DelayedNesterov, Elastic, Nesterov
from pycomm.asynchronous.server_meeting import ServerMeeting
from pycomm.communicator import Communicator
from pycomm.compression import Compression, NoCompression
from pycomm.cost.auto import Auto
from pycomm.optim.attached import refuse_second_average
from pycomm.optim.parameters import checked_optimizer, optimizer_parameters
from pycomm.reducer.agreement import agreed
from pycomm.reducer.broadcast import check_same_lines, named_tensors, share_tensors, signature
from pycomm.reducer.settings import checked_method
from pycomm.transport.authentication import secret
from pycomm.transport.choice import version
from pycomm.transport.own_group import timeout_seconds


def local_sgd(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    every: int,
    outer: Nesterov | DelayedNesterov | None = None,
    fragments: int = 1,
    delay: int = 0,
    compression: Compression | str | None = None,
    on_failure: str = "raise",
    join: str | None = None,
    quorum: int | None = None,
    per_rank: Iterable[str] = (),
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
) -> Averager:
    """Let each rank step by itself, and average the parameters over the ranks every so many steps.

    The loop stays ``zero_grad``, ``backward``, ``step``: what there is to do is done at the end of
    ``optimizer.step()``. The state of ``optimizer`` stays each rank's own. Collective: rank 0's parameters are first
    copied to all ranks. Do not wrap the model, and do not ``attach`` the optimizer as well.

    Args:
        optimizer: any torch optimizer.
        model: its parameters must all belong to the optimizer, and be all float32 or all float64, on one device.
        every: number of steps from one meeting to the next; equal on all ranks, which must make equally many.
        outer: what is done with the mean. ``None``: it becomes the parameters (local SGD; post-local SGD, if this is
            called after a beginning with ``attach``, which must be detached). ``pycomm.Nesterov()``: DiLoCo.
            ``pycomm.DelayedNesterov()``: for ranks of different speed, none of which waits for another. Each hands in
            how far it has gone when it is there, and goes on from what that has come to; slower ranks do so after
            fewer steps, in about the same time (dynamic local updates: Liu et al., "Asynchronous Local-SGD Training
            for Language Modeling", 2024).
        fragments: number of parts, of about as many bytes, that meet in turns, each every ``every`` steps: then the
            same bytes travel in smaller portions (Douillard et al., "Streaming DiLoCo", 2025).
        delay: number of steps, below ``every``, that ranks make while a mean is on its way. What it comes to is then
            mixed, half and half, with where the parameters have gone meanwhile (there, section 3.2). 0: ranks wait.
        compression: how far a rank has gone travels by this method, an object or a name such as "fp16"; what it leaves
            over is added at the next meeting.
        on_failure: treatment of ranks that are lost: that die, are stopped or do not come within the timeout. "raise":
            ``optimizer.step()`` raises a CommError on the others. "shrink": they go on, and the meeting is made again
            without it; and others may join. In CPU memory only. With a ``delay`` that takes another copy of the
            parameters.
        join: address, "host:port" or "[::1]:port", of the store in which other ranks have met, to become one more of
            them after their next meeting. Such a process calls no ``init_process_group``; it begins with their
            parameters, and with the state that ``optimizer`` has. Wants "shrink", on all ranks.
        quorum: number of ranks that a meeting wants, with ``pycomm.Nesterov()``. It waits for others no longer than is
            worth it, by when they have come so far; those that it does not wait for come to a later one. Ranks count by
            their steps, or what ``set_weight`` says ("Decoupled DiLoCo", 2026). Steps are as with ``DelayedNesterov``.
            For both, rank 0 holds what the ranks have in common in a thread: a rank that is lost harms nobody, but if
            rank 0 is lost, all others get a CommError. Without ``fragments``, ``delay``, "shrink".
        per_rank: names of numbers of parameter groups, such as "lr", that may differ between ranks. All others are
            compared in each meeting, but for those that the optimizer changes in its own steps.
        process_group: the ranks; the default group if ``None``.
        timeout: limit of every wait for a peer; seconds or ``timedelta``. ``None``: the process group's own.

    Raises:
        TypeError, ValueError: an argument is wrong, or the ranks differ in them or in names, shapes or dtypes of
            parameters: on every rank. From ``optimizer.step()``: parameters are no longer those of ``model`` and
            ``optimizer``, or the ranks' numbers of parameter groups differ.
        CommError: a rank did not come. ``optimizer.step()`` raises it, too, if one is lost.
        RuntimeError: from ``optimizer.step()``, on every rank: a parameter of one of them is not finite; or the ranks
            have made different numbers of steps, or one of them has left out a batch (see ``skip_step`` of the handle).
    """
    options = {
        "every": every,
        "outer": outer,
        "fragments": fragments,
        "delay": delay,
        "compression": compression,
        "on_failure": on_failure,
        "join": join,
        "quorum": quorum,
        "per_rank": per_rank,
    }
    if quorum is not None or isinstance(outer, DelayedNesterov):
        return _decouple(optimizer, model, options, process_group, timeout)
    return _average(optimizer, model, _Request(lambda: _checked_outer(outer), options), process_group, timeout)


def elastic_averaging(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    every: int,
    strength: float = 0.9,
    per_rank: Iterable[str] = (),
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
) -> LocalAverager:
    """Let each rank step by itself, held by a spring to a center that all ranks have in common (EASGD).

    Every so many steps rank i's parameters x_i and the center c move towards each other, with a = strength / ranks:
    x_i becomes x_i - a (x_i - c), and c becomes c + a times the sum of (x_i - c) (Zhang, Choromanska and LeCun, "Deep
    learning with Elastic Averaging SGD", 2015). With momentum in ``optimizer`` it is EAMSGD. The ranks stay different,
    which explores more; in the end :meth:`LocalAverager.take_center` makes the center everybody's parameters.

    Args:
        optimizer, model, per_rank, process_group, timeout: as of :func:`local_sgd`.
        every: number of steps from one meeting to the next; equal on all ranks, which must make equally many.
        strength: beta, above 0 and at most 1; the paper has 0.9.

    Raises:
        TypeError, ValueError, CommError, RuntimeError: as of :func:`local_sgd`.
    """

    def checked() -> Outer:
        checks.bounded("strength", strength, "a number above 0 and at most 1", lambda b: 0 < b <= 1)
        return Elastic(float(strength))

    return _average(
        optimizer,
        model,
        _Request(checked, {"every": every, "per_rank": per_rank}, "elastic_averaging"),
        process_group,
        timeout,
    )


_DEFAULTS = {"fragments": 1, "delay": 0, "on_failure": "raise", "join": None, "per_rank": ()}
"""Options that only ranks have that wait for each other."""


@dataclass(frozen=True)
class _Request:
    """What was asked for, before it is checked."""

    outer: Callable[[], Outer]
    options: dict[str, Any]
    call: str = "local_sgd"


@dataclass(frozen=True)
class _Settings:
    """What was asked for, checked."""

    outer: Outer
    method: Compression
    rhythm: Rhythm
    fragments: int
    survives: bool
    named: dict[str, torch.Tensor]
    per_rank: tuple[str, ...]
    call: str

    def lines(self, optimizer: torch.optim.Optimizer) -> Lines:
        """Return what ranks must have in common."""
        settings = f"outer={self.outer!r}", f"compression={self.method!r}", f"on_failure shrinks: {self.survives}"
        return [
            ("the version of pycomm", version()),
            ("the optimizer", type(optimizer).__name__),
            ("setting", f"every={self.rhythm.every}"),
            ("setting", f"delay={self.rhythm.delay}"),
            ("setting", f"fragments={self.fragments}"),
            ("setting", f"per_rank={list(self.per_rank)}"),
            *(("setting", line) for line in settings),
            *(("parameter", f"{name}: {signature(p)}") for name, p in self.named.items()),
        ]

    def loop_of(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Loop:
        """Return the loop that trains them."""
        return Loop(Known(model, optimizer, self.named, f"{self.call}()"), model, optimizer, self.per_rank)

    def make_fragments(self) -> list[Fragment]:
        """Make the fragments, which are not open yet."""
        keeps = self.survives and self.rhythm.delay > 0
        return [Fragment(part, self.outer, self.method, keeps) for part in _split(self.named, self.fragments)]


def _checked_outer(outer: Any) -> Outer:
    if outer is not None and not isinstance(outer, Nesterov):
        raise TypeError(f"outer is {outer!r}, wanted None, a pycomm.Nesterov or a pycomm.DelayedNesterov")
    return outer


def _checked(optimizer: torch.optim.Optimizer, model: torch.nn.Module, request: _Request) -> _Settings:
    options = {**_DEFAULTS, "compression": None, **request.options}
    every, delay, fragments = options["every"], options["delay"], options["fragments"]
    outer, named = request.outer(), checked_parameters(optimizer, model, every, fragments, f"{request.call}()")
    if checks.count("delay", delay, 0) >= every:
        raise ValueError(f"delay={delay}, wanted less than every={every}: the next meeting would begin before that")
    method = _named_method(options["compression"]) or NoCompression()
    if options["on_failure"] not in ("raise", "shrink"):
        raise ValueError(f'on_failure is {options["on_failure"]!r}, wanted "raise" or "shrink"')
    survives = options["on_failure"] == "shrink"
    if survives and next(iter(named.values())).device.type != "cpu":
        raise ValueError('on_failure="shrink" wants parameters in CPU memory')
    if survives:
        secret()  # by which newcomers are known: what is wrong with it is told to all ranks
    if options["join"] is not None and not survives:
        raise ValueError('join wants on_failure="shrink", as the ranks that are there have it')
    # Fragment i meets so many steps after the last meeting of all.
    turns = tuple(every * (i + 1) // fragments for i in range(fragments))
    per_rank = _checked_per_rank(options["per_rank"], optimizer)
    return _Settings(outer, method, Rhythm(every, delay, turns), fragments, survives, named, per_rank, request.call)


def _checked_per_rank(per_rank: Any, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    if isinstance(per_rank, str) or not isinstance(per_rank, Iterable):
        raise TypeError(f'per_rank is {per_rank!r}, wanted names of numbers of parameter groups, like ("lr",)')
    names = tuple(per_rank)
    known = {key for group in optimizer.param_groups for key in group} - {"params"}
    for name in names:
        if name not in known:
            raise ValueError(f"per_rank has {name!r}, wanted names out of {', '.join(sorted(known))}")
    return names


def _named_method(compression: Any) -> Compression | None:
    """Return the method, ``None`` for none at all."""
    method = checked_method(compression)
    if isinstance(method, Auto):
        raise ValueError('compression="auto" measures many steps, and ranks that meet this seldom have few: name one')
    return None if isinstance(method, NoCompression) else method


def _average(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    request: _Request,
    process_group: dist.ProcessGroup | None,
    timeout: timedelta | float | None,
) -> LocalAverager:
    if request.options.get("join") is not None:
        return _join(optimizer, model, request, timeout)
    communicator = Communicator(process_group, timeout)
    try:
        outcome: _Settings | Exception
        try:
            optimizer = checked_optimizer(optimizer, model, request.call)
            outcome = _checked(optimizer, model, request)
        except Exception as error:  # a foreign object may raise anything
            outcome = error
        settings = agreed(communicator, outcome)
        lines = settings.lines(optimizer)
        for kind in ("setting", "parameter"):
            check_same_lines(communicator, [text for what, text in lines if what == kind], kind)
        share_tensors(communicator, named_tensors(model), src=0)
        group = ElasticGroup.found(communicator, lines) if settings.survives else None
        fragments, loop = settings.make_fragments(), settings.loop_of(optimizer, model)
        buffers = list(model.buffers())
        return LocalAverager(communicator, optimizer, fragments, settings.rhythm, group, buffers, loop)
    except BaseException:
        communicator.close()
        raise


def _decouple(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    options: Mapping[str, Any],
    process_group: dist.ProcessGroup | None,
    timeout: timedelta | float | None,
) -> DecoupledAverager:
    outcome: tuple[torch.optim.Optimizer, dict[str, torch.Tensor], Compression | None] | Exception
    try:
        outcome = _checked_decoupled(optimizer, model, options, process_group)
    except Exception as error:  # a foreign object may raise anything
        outcome = error
    if dist.is_initialized():  # a rank without a quorum opens a communicator, too
        with Communicator(timeout=timeout) as communicator:
            outcome = agreed(communicator, outcome)
            check_same_lines(communicator, ["ranks meet one by one"], "setting")
    meeting, every, outer, quorum = ServerMeeting(timeout), *(options[name] for name in ("every", "outer", "quorum"))
    if isinstance(outcome, Exception):
        meeting.compare([], outcome)  # raises it, on all ranks
    assert not isinstance(outcome, Exception)
    optimizer, named, method = outcome
    lines = [f"pycomm {version()}", f"every={every}", f"outer={outer!r}", f"quorum={quorum}", f"{method!r}"]
    meeting.compare([*lines, *(f"{name}: {signature(p)}" for name, p in named.items())])
    loop = Loop(Known(model, optimizer, named, "local_sgd()"), model, optimizer)
    return DecoupledAverager(meeting, optimizer, named, Pace(every, quorum, outer, method, meeting.timeout), loop)


def _checked_decoupled(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    options: Mapping[str, Any],
    process_group: dist.ProcessGroup | None,
) -> tuple[torch.optim.Optimizer, dict[str, torch.Tensor], Compression | None]:
    """Return the optimizer, the parameters by name and the method. Raise TypeError or ValueError if one is wrong."""
    optimizer = checked_optimizer(optimizer, model, "local_sgd")
    named = checked_parameters(optimizer, model, options["every"])
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    _require_decoupled({**options, "process_group": process_group}, size)
    if next(iter(named.values())).device.type != "cpu":
        raise ValueError("ranks that meet one by one want parameters in CPU memory")
    return optimizer, named, _named_method(options["compression"])


def _require_decoupled(options: Mapping[str, Any], num_ranks: int) -> None:
    """Raise TypeError or ValueError if ranks cannot meet one by one like this."""
    for name, default in {**_DEFAULTS, "process_group": None}.items():
        if options[name] != default:
            what = f"{name}={options[name]!r} does not go with ranks that meet one by one"
            raise ValueError(f"{what} (quorum, or outer=DelayedNesterov)")
    outer, quorum = options["outer"], options["quorum"]
    if quorum is None:
        return
    if not isinstance(outer, Nesterov):
        raise ValueError(f"quorum={quorum} with outer={outer!r}: it merges by a pycomm.Nesterov")
    if checks.count("quorum", quorum, 1) > num_ranks:
        raise ValueError(f"quorum={quorum} of {num_ranks} ranks")


def _join(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, request: _Request, timeout: timedelta | float | None
) -> LocalAverager:
    optimizer = checked_optimizer(optimizer, model, "local_sgd")
    settings = _checked(optimizer, model, request)
    group = ElasticGroup.join(request.options["join"], settings.lines(optimizer), timeout_seconds(timeout))
    fragments, buffers, loop = settings.make_fragments(), list(model.buffers()), settings.loop_of(optimizer, model)
    made: LocalAverager | None = None
    try:
        made = LocalAverager(group.communicator, optimizer, fragments, settings.rhythm, group, buffers, loop)
        made.share_state(is_newcomer=True)
        return made
    except BaseException:
        if made is not None:
            made.detach()
        group.close("it could not join")
        group.communicator.close()
        raise


def checked_parameters(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, every: Any, fragments: Any = 1, call: str = "local_sgd()"
) -> dict[str, torch.Tensor]:
    """Return the parameters by name. Raise TypeError or ValueError if these cannot be averaged."""
    checks.count("every", every, 1)
    checks.instance("model", model, torch.nn.Module)
    named: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if checks.count("fragments", fragments, 1) > min(every, len(named)):
        raise ValueError(f"fragments={fragments}, wanted at most every={every} and the {len(named)} parameters")
    refuse_second_average(named, call)
    own = {id(p) for p in optimizer_parameters(optimizer)}
    left = next((name for name, p in named.items() if id(p) not in own), None)
    if left is not None:
        raise ValueError(f"parameter {left!r} does not belong to the optimizer")
    there = {id(p) for p in model.parameters()}
    alone = next((p for p in optimizer_parameters(optimizer) if p.requires_grad and id(p) not in there), None)
    if alone is not None:
        raise ValueError(
            f"the optimizer has a parameter of shape {list(alone.shape)} that is not in the model, and would stay each "
            "rank's own: pass a module that has all of them"
        )
    kinds = sorted({f"{p.dtype} on {p.device}" for p in named.values()})
    if len(kinds) != 1 or next(iter(named.values())).dtype not in (torch.float32, torch.float64):
        raise ValueError(f"parameters are {', '.join(kinds)}, wanted all float32 or all float64 on one device")
    return named


def _split(named: Mapping[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Return ``named`` in ``count`` groups of about equal size, none of which is empty; in their order."""
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
