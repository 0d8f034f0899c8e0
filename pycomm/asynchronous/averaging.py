"""Averaging less often: ranks step by themselves, and meet every so many steps (local SGD, DiLoCo, EASGD)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycomm import checks
from pycomm.communicator import DEFAULT_TIMEOUT, Communicator
from pycomm.optim.parameters import optimizer_parameters, unwrapped
from pycomm.reducer.agreement import agreed
from pycomm.reducer.broadcast import broadcast_tensors, check_same_lines, signature

_FORMAT = 1


@dataclass(frozen=True)
class Nesterov:
    """Outer optimizer of DiLoCo: SGD with Nesterov momentum, whose gradient is how far the ranks have gone on average.

    With d the mean over the ranks of (parameters at the last meeting - parameters now): v = momentum * v + d, and
    the parameters become those at the last meeting - lr * (d + momentum * v) (Douillard et al., "DiLoCo", 2023).

    Args:
        lr: positive; the paper has 0.7.
        momentum: from 0 to below 1; the paper has 0.9.

    Raises:
        TypeError, ValueError: an argument is wrong; it is named.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        checks.real("lr", self.lr, 0.0, or_equal=False)
        checks.real("momentum", self.momentum, 0.0, 1.0)


@dataclass(frozen=True)
class _Elastic:
    """Outer optimizer of elastic averaging: ``strength`` is beta, the ranks' pull on their center together."""

    strength: float


_Outer = Nesterov | _Elastic | None


def local_sgd(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    every: int,
    outer: Nesterov | None = None,
    fragments: int = 1,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
) -> LocalAverager:
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
        fragments: number of parts, of about as many bytes, that meet in turns, each every ``every`` steps: then the
            same bytes travel in smaller portions (Douillard et al., "Streaming DiLoCo", 2025, without its overlap).
        process_group: the ranks; the default group if ``None``.
        timeout: limit of every wait for a peer; seconds or ``timedelta``.

    Raises:
        TypeError, ValueError: an argument is wrong, or the ranks differ in them or in names, shapes or dtypes of
            parameters: on every rank.
        CommError: a rank did not come. ``optimizer.step()`` raises it, too, if one is lost.
    """

    def checked() -> _Outer:
        if outer is not None and not isinstance(outer, Nesterov):
            raise TypeError(f"outer is {outer!r}, wanted None or a pycomm.Nesterov")
        return outer

    return _average(optimizer, model, every, checked, fragments, process_group, timeout)


def elastic_averaging(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    every: int,
    strength: float = 0.9,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
) -> LocalAverager:
    """Let each rank step by itself, held by a spring to a center that all ranks have in common (EASGD).

    Every so many steps rank i's parameters x_i and the center c move towards each other, with a = strength / ranks:
    x_i becomes x_i - a (x_i - c), and c becomes c + a times the sum of (x_i - c) (Zhang, Choromanska and LeCun, "Deep
    learning with Elastic Averaging SGD", 2015). With momentum in ``optimizer`` it is EAMSGD. The ranks stay different,
    which explores more; in the end :meth:`LocalAverager.take_center` makes the center everybody's parameters.

    Args:
        optimizer, model, process_group, timeout: as of :func:`local_sgd`.
        every: number of steps from one meeting to the next; equal on all ranks, which must make equally many.
        strength: beta, above 0 and at most 1; the paper has 0.9.

    Raises:
        TypeError, ValueError, CommError: as of :func:`local_sgd`.
    """

    def checked() -> _Outer:
        checks.bounded("strength", strength, "a number above 0 and at most 1", lambda b: 0 < b <= 1)
        return _Elastic(float(strength))

    return _average(optimizer, model, every, checked, 1, process_group, timeout)


def _average(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    every: int,
    checked_outer: Callable[[], _Outer],
    fragments: int,
    process_group: dist.ProcessGroup | None,
    timeout: timedelta | float,
) -> LocalAverager:
    communicator = Communicator(process_group, timeout)
    try:
        request: Any
        try:
            optimizer = unwrapped(optimizer)
            request = checked_outer(), checked_parameters(optimizer, model, every, fragments)
        except (TypeError, ValueError) as error:
            request = error
        outer, named = agreed(communicator, request)
        settings = [f"every={every}", f"outer={outer!r}", f"fragments={fragments}"]
        check_same_lines(communicator, settings, "setting")
        check_same_lines(communicator, [f"{name}: {signature(p)}" for name, p in named.items()], "parameter")
        broadcast_tensors(communicator, [*model.parameters(), *model.buffers()], src=0)
        return LocalAverager(communicator, optimizer, named, every, outer, fragments)
    except BaseException:
        communicator.close()
        raise


def checked_parameters(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, every: Any, fragments: Any = 1
) -> dict[str, torch.Tensor]:
    """Return the parameters by name. Raise TypeError or ValueError if these cannot be averaged."""
    checks.count("every", every, 1)
    named: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if checks.count("fragments", fragments, 1) > min(every, len(named)):
        raise ValueError(f"fragments={fragments}, wanted at most every={every} and the {len(named)} parameters")
    own = {id(p) for p in optimizer_parameters(optimizer)}
    left = next((name for name, p in named.items() if id(p) not in own), None)
    if left is not None:
        raise ValueError(f"parameter {left!r} does not belong to the optimizer")
    kinds = sorted({f"{p.dtype} on {p.device}" for p in named.values()})
    if len(kinds) != 1 or next(iter(named.values())).dtype not in (torch.float32, torch.float64):
        raise ValueError(f"parameters are {', '.join(kinds)}, wanted all float32 or all float64 on one device")
    return named


class _Fragment:
    """Part of the parameters that meets at once.

    Attributes:
        params: its parameters.
        anchor: what they were after the last meeting, or the center to which they are held; flat.
        velocity: of the outer optimizer, flat; ``None`` if it has none.
    """

    def __init__(self, communicator: Communicator, params: Sequence[torch.Tensor], outer: _Outer) -> None:
        self._communicator, self.params, self._outer = communicator, list(params), outer
        self._sizes = [p.numel() for p in params]
        kind = params[0]
        self._memory = communicator.empty(sum(self._sizes) + 1, kind.dtype, kind.device)
        self.anchor = torch.cat([p.detach().reshape(-1) for p in params])
        self.velocity = torch.zeros_like(self.anchor) if isinstance(outer, Nesterov) else None

    @property
    def num_bytes(self) -> int:
        """Number of bytes that it hands over at each meeting."""
        return self._memory.nbytes

    @torch.no_grad()
    def meet(self, weight: float) -> None:
        """Go on from the ranks' mean. Collective."""
        moved, mass = self._memory[:-1], self._memory[-1:]
        for part, before, p in zip(
            torch.split(moved, self._sizes), torch.split(self.anchor, self._sizes), self.params, strict=True
        ):
            torch.sub(before.view(p.shape), p, out=part.view(p.shape))
            if isinstance(self._outer, _Elastic):
                p.add_(part.view(p.shape), alpha=self._outer.strength / self._communicator.size)
        if weight != 1.0:
            moved.mul_(weight)
        mass.fill_(weight)
        self._communicator.all_reduce(self._memory)
        moved.div_(mass)
        if isinstance(self._outer, _Elastic):
            self.anchor.sub_(moved, alpha=self._outer.strength)
            return
        if isinstance(self._outer, Nesterov) and self.velocity is not None:
            self.velocity.mul_(self._outer.momentum).add_(moved)
            self.anchor.sub_(moved.add_(self.velocity, alpha=self._outer.momentum), alpha=self._outer.lr)
        else:
            self.anchor.sub_(moved)
        self.go_to_anchor()

    @torch.no_grad()
    def go_to_anchor(self) -> None:
        """Overwrite the parameters with the anchor."""
        for part, p in zip(torch.split(self.anchor, self._sizes), self.params, strict=True):
            p.copy_(part.view(p.shape))


class LocalAverager:
    """Handle of :func:`local_sgd` and :func:`elastic_averaging`, kept alive by the optimizer's hook."""

    def __init__(
        self,
        communicator: Communicator,
        optimizer: torch.optim.Optimizer,
        named: dict[str, torch.Tensor],
        every: int,
        outer: _Outer,
        fragments: int,
    ) -> None:
        self._communicator, self._every = communicator, every
        self._names = list(named)
        groups = _split(list(named.values()), fragments)
        self._fragments = [_Fragment(communicator, params, outer) for params in groups]
        # Fragment i meets so many steps after the last meeting of all.
        self._turns = [every * (i + 1) // fragments for i in range(fragments)]
        self._weight, self._num_steps, self._num_meetings = 1.0, 0, 0
        self._bytes, self._seconds = 0, 0.0
        self._hook: Any = optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: object) -> None:
        self._num_steps += 1
        phase = (self._num_steps - 1) % self._every + 1
        for fragment, turn in zip(self._fragments, self._turns, strict=True):
            if turn == phase:
                self._meet(fragment)

    def _meet(self, fragment: _Fragment) -> None:
        start = time.perf_counter()
        fragment.meet(self._weight)
        self._seconds += time.perf_counter() - start
        self._bytes += fragment.num_bytes
        self._num_meetings += 1

    def set_weight(self, num_samples: float) -> None:
        """Weigh this rank by so many samples or tokens in the meetings from now on; all ranks count alike at first.

        Raises:
            TypeError, ValueError: ``num_samples`` is not a positive number.
        """
        self._require_attached()
        self._weight = checks.positive("num_samples", num_samples)

    def meet(self) -> None:
        """Let all fragments meet now: at the end of training, or before an evaluation. Collective."""
        self._require_attached()
        for fragment in self._fragments:
            self._meet(fragment)

    def take_center(self) -> None:
        """Make what the ranks have in common the parameters of all: the center, or those after the last meeting."""
        self._require_attached()
        for fragment in self._fragments:
            fragment.go_to_anchor()

    def stats(self) -> dict[str, Any]:
        """Return ``steps``, ``meetings`` (of fragments), ``bytes_sent`` and ``wait_seconds``, those in meetings."""
        return {
            "steps": self._num_steps,
            "meetings": self._num_meetings,
            "bytes_sent": self._bytes,
            "wait_seconds": self._seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and by parameter what it was at its last meeting and the outer velocity.

        Equal on all ranks. It loads with ``torch.load(weights_only=True)``.
        """
        self._require_attached()
        anchors: dict[str, torch.Tensor] = {}
        velocities: dict[str, torch.Tensor] = {}
        names = iter(self._names)
        for fragment in self._fragments:
            sizes = [p.numel() for p in fragment.params]
            own = [next(names) for _ in sizes]
            shapes = [p.shape for p in fragment.params]
            for kept, flat in ((anchors, fragment.anchor), (velocities, fragment.velocity)):
                if flat is not None:
                    parts = torch.split(flat, sizes)
                    kept |= {n: part.view(s).clone() for n, part, s in zip(own, parts, shapes, strict=True)}
        return {"format": _FORMAT, "steps": self._num_steps, "anchors": anchors, "velocities": velocities}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned. The parameters stay as they are: load the model's own state.

        Raises:
            ValueError: it is of other parameters, or was saved with another outer optimizer.
        """
        self._require_attached()
        current = self.state_dict()
        if not isinstance(state, dict) or state.keys() != current.keys() or state["format"] != _FORMAT:
            raise ValueError("state is not a LocalAverager.state_dict()")
        for what in ("anchors", "velocities"):
            mine = {name: t.shape for name, t in current[what].items()}
            if {name: t.shape for name, t in state[what].items()} != mine:
                raise ValueError(f"state[{what!r}] is of other parameters, or of another outer optimizer")
        self._num_steps = int(state["steps"])
        names = iter(self._names)
        for fragment in self._fragments:
            own = [next(names) for _ in fragment.params]
            fragment.anchor.copy_(torch.cat([state["anchors"][name].reshape(-1) for name in own]))
            if fragment.velocity is not None:
                fragment.velocity.copy_(torch.cat([state["velocities"][name].reshape(-1) for name in own]))

    def detach(self) -> None:
        """Meet no more; release the memory. Idempotent, not collective."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._fragments = []
            self._communicator.close()

    def _require_attached(self) -> None:
        if self._hook is None:
            raise RuntimeError("this LocalAverager is detached")


def _split(params: list[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Return ``params`` in ``count`` groups of about equal size, none of which is empty; in their order."""
    groups: list[list[torch.Tensor]] = []
    left = sum(p.numel() for p in params)
    rest = list(params)
    for number in range(count, 0, -1):
        group, size = [rest.pop(0)], 0
        size = group[0].numel()
        while len(rest) >= number and (number == 1 or size + rest[0].numel() / 2 <= left / number):
            size += rest[0].numel()
            group.append(rest.pop(0))
        groups.append(group)
        left -= size
    return groups
