"""Fragments: parameters that are averaged together, their state between meetings, and outer optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pycomm import checks
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import strides_of
from pycomm.collectives.transport.gpu import GpuWork
from pycomm.compression.base import Compression, Exchange, Scaling
from pycomm.compression.dense import by_method
from pycomm.errors import CommError
from pycomm.optim.masters import MasterWeights
from pycomm.optim.step_override import HALF, stepper_of
from pycomm.training.asynchronous.arguments import name_of_not_finite
from pycomm.training.reductions.reduction import Reduction
from pycomm.worker import Work


@dataclass(frozen=True)
class Nesterov:
    """Outer optimizer of DiLoCo: SGD with Nesterov momentum on the mean change of the ranks' parameters.

    With w the parameters of the last meeting, and d the mean over the ranks of (w - parameters now):
    v = momentum * v + d, and the parameters become w - lr * (d + momentum * v) (Douillard et al., "DiLoCo", 2023).

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

    def step(self, anchor: torch.Tensor, velocity: torch.Tensor, moved: torch.Tensor) -> None:
        """Step the flat ``anchor`` and ``velocity`` by the mean change ``moved``, which may be overwritten."""
        velocity.mul_(self.momentum).add_(moved)
        anchor.sub_(moved.add_(velocity, alpha=self.momentum), alpha=self.lr)

    def optimizer(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Return a torch optimizer that takes the same steps with ``.grad``."""
        return torch.optim.SGD(params, self.lr, self.momentum, nesterov=self.momentum > 0)


@dataclass(frozen=True)
class Elastic:
    """Elastic averaging (EASGD): ranks stay different, which explores more, and are pulled towards a common center.

    With a = strength / ranks, rank i's parameters x_i become x_i - a (x_i - c), and the center c becomes c plus a
    times the sum of (x_i - c) (Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", 2015). With
    momentum in the ranks' optimizers this is EAMSGD. At the end of training, ``take_center()`` of the handle copies the
    center to all ranks' parameters.

    Args:
        strength: beta, above 0 and at most 1; the paper has 0.9.

    Raises:
        TypeError, ValueError: ``strength`` is wrong.
    """

    strength: float = 0.9

    def __post_init__(self) -> None:
        checks.bounded("strength", self.strength, "a number above 0 and at most 1", lambda b: 0 < b <= 1)


Outer = Nesterov | Elastic | None

Check = Callable[[Communicator], float]
"""Compares the ranks' loops; raises on all ranks if they do not match, otherwise returns the sum of the weights."""

_LATE = 0.5
"""Share of a late mean in the mix with parameters stepped meanwhile (Douillard et al., "Streaming DiLoCo", 2025)."""


class _FragmentPart:
    """Parameters of a fragment that share one compression method. What is kept of half-precision ones is float32.

    Attributes:
        anchor: parameters of the last meeting, or the center of elastic averaging; flat, as the bucket is.
        velocity: velocity of the outer optimizer, flat; ``None`` if it has none.
        mean: result of a meeting that is not applied yet, in the bucket's memory or in its own.
    """

    def __init__(
        self,
        named: Mapping[str, torch.Tensor],
        method: Compression,
        outer: Outer,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
    ) -> None:
        self.names, self.params, self._method = list(named), list(named.values()), method
        self._optimizer, self._strides = optimizer, list(map(strides_of, self.params))
        first, size = self.params[0], sum(p.numel() for p in self.params)
        dtype = torch.float32 if first.dtype in HALF else first.dtype
        self.anchor = torch.empty(size, dtype=dtype, device=first.device)
        self.velocity = torch.zeros_like(self.anchor) if isinstance(outer, Nesterov) else None
        self.mean: torch.Tensor | None = None
        self._kept: torch.Tensor | None = None
        for view, p in self.views_of(self.anchor):
            view.copy_(p)
        self.bucket, self.exchange = self._exchange_over(communicator)

    def _exchange_over(self, communicator: Communicator) -> tuple[Bucket, Exchange]:
        bucket = Bucket(self.names, [view for view, _ in self.views_of(self.anchor)], communicator)
        return bucket, self._method.make(bucket, communicator)

    def move(self, communicator: Communicator) -> None:
        """Switch to ``communicator``; anchor, velocity, residuals, and a mean that was received are kept."""
        self.mean, state = None if self.mean is None else self.mean.clone(), self.exchange.state()
        self.bucket, self.exchange = self._exchange_over(communicator)
        self.exchange.load_state(state)

    def views_of(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return for each parameter its view of ``flat``, and the tensor that is averaged: its master if it has one."""
        stepper = stepper_of(self._optimizer)
        stepper.masters()  # takes what was written to the parameters
        params = map(stepper.master_of, self.params) if isinstance(stepper, MasterWeights) else self.params
        parts = torch.split(flat[: len(self.anchor)], [p.numel() for p in self.params])
        places = zip(parts, params, self._strides, strict=True)
        return [(part.as_strided(p.shape, strides), p.detach()) for part, p, strides in places]

    def fill(self) -> None:
        """Write anchor minus parameters to the bucket."""
        for place, (before, p) in zip(self.bucket.places, self.views_of(self.anchor), strict=True):
            torch.sub(before, p, out=place)

    def keep(self) -> None:
        """Keep a copy of the bucket, for :meth:`restore`."""
        flat = self.bucket.flat
        self._kept = flat.clone() if self._kept is None else self._kept.copy_(flat)

    def restore(self) -> None:
        assert self._kept is not None
        self.bucket.flat.copy_(self._kept)


class Fragment:
    """Parameters that are averaged together.

    Args:
        named: the parameters.
        outer: outer optimizer, which applies the mean.
        method: compression of the exchange.
        keeps: whether to keep what was sent, because a meeting may be repeated after further steps.
        optimizer: the parameters'; its masters are averaged, if it has some.
        communicator: the ranks.

    Attributes:
        launched: number of steps at the start of the meeting under way; ``None`` if there is none.
        num_meetings: number of completed meetings.
        met_at: number of steps at the last meeting that had no delay; -1 before.
    """

    def __init__(
        self,
        named: Mapping[str, torch.Tensor],
        outer: Outer,
        method: Compression,
        keeps: bool,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
    ) -> None:
        self.names, items = list(named), list(named.items())
        self.outer, self.method, self._keeps, self._weight = outer, method, keeps, 1.0
        self._optimizer = optimizer
        self._parts = [
            _FragmentPart(dict(items[i] for i in indices), chosen, outer, optimizer, communicator)
            for chosen, indices in by_method(method, list(named.values()))
        ]
        self.launched: int | None = None
        self.num_meetings, self.met_at = 0, -1
        self._sent_before = self._num_ranks = 0  # of the last exchange
        self._work: Work | GpuWork | None = None
        self._communicator, self._reduction = communicator, self._reduction_over(communicator)

    def _reduction_over(self, communicator: Communicator) -> Reduction:
        bucket = self._parts[0].bucket
        return Reduction(communicator, bucket.device, on_gpu=bucket.on_gpu)

    @property
    def params(self) -> list[torch.Tensor]:
        return [param for part in self._parts for param in part.params]

    def _sent(self) -> int:
        return sum(part.exchange.bytes_sent for part in self._parts)

    @property
    def bytes_sent(self) -> int:
        return self._sent_before + self._sent()

    def steps_since_launch(self, num_steps: int) -> int:
        """Return how many of ``num_steps`` steps were taken since the meeting under way began."""
        assert self.launched is not None
        return num_steps - self.launched

    # A meeting.

    @torch.no_grad()
    def launch(self, check: Check, weight: float, num_steps: int, then: Callable[[], None]) -> None:
        """Begin a meeting; the communication thread calls ``then`` when it has the mean. Collective."""
        self.launched, self._weight, self._check = num_steps, weight, check
        for part in self._parts:
            part.fill()
            if self._keeps:
                part.keep()
        self._submit(then)

    @torch.no_grad()
    def launch_again(self, then: Callable[[], None]) -> None:
        """Repeat the meeting under way with the same contribution of this rank."""
        for part in self._parts:
            if self._keeps:
                part.restore()
            else:  # without a delay, the parameters have not changed
                part.fill()
        self._submit(then)

    def _submit(self, then: Callable[[], None]) -> None:
        channel, reduction, size = self._communicator.channel, self._reduction, self._communicator.size

        def job() -> None:
            self._num_ranks = size
            for part in self._parts:
                reduction.exchange(part.exchange, part.bucket.places)
            then()

        reduction.begin(
            Scaling(size, step=self.num_meetings), lambda: self._weight * size / self._check(self._communicator)
        )
        self._work = reduction.submit(job, channel)

    @property
    def has_mean(self) -> bool:
        """Whether the mean of the meeting under way was received."""
        return self._parts[0].mean is not None

    def receive(self) -> None:
        """Wait for the mean.

        Raises:
            CommError: a rank was lost meanwhile.
            RuntimeError, ValueError: on all ranks: a rank's parameters are not finite, or the ranks' loops do not
                match (:mod:`pycomm.training.asynchronous.loop`).
        """
        assert self._work is not None
        try:
            self._work.wait()
        except CommError:
            if isinstance(self._work, Work):
                self._work.forget_trace()  # it would keep the old communicator's memory mapped
            raise
        except (RuntimeError, ValueError):
            self._work = self.launched = None
            raise
        self.take_mean()

    def take_mean(self) -> None:
        """End the exchanges of a meeting that all ranks have completed, and keep the mean."""
        finite = bool(self._reduction.verdict(self._parts))
        for part in self._parts:
            part.exchange.finish(finite)
        self._work = None
        if not finite:
            self.launched = None
            named = [pair for part in self._parts for pair in zip(part.names, part.params, strict=True)]
            why = name_of_not_finite(self._communicator, named)
            raise RuntimeError(f"the parameters of the ranks have no mean: {why}")
        self.num_meetings += 1
        for part in self._parts:
            part.mean = part.bucket.flat

    @torch.no_grad()
    def apply_mean(self, *, is_late: bool) -> None:
        """Apply the received mean; ``is_late``: the parameters were stepped since the meeting began."""
        self.launched = None
        if isinstance(self.outer, Elastic):  # before the center moves
            self.move_to_anchor(share=self.outer.strength / self._num_ranks)
        for part in self._parts:
            moved, part.mean = part.mean, None
            assert moved is not None
            if isinstance(self.outer, Elastic):
                part.anchor.sub_(moved, alpha=self.outer.strength)
            elif isinstance(self.outer, Nesterov):
                assert part.velocity is not None
                self.outer.step(part.anchor, part.velocity, moved)
            else:
                part.anchor.sub_(moved)
        if not isinstance(self.outer, Elastic):
            self.move_to_anchor(share=_LATE if is_late else 1.0)

    @torch.no_grad()
    def move_to_anchor(self, share: float = 1.0) -> None:
        """Move the parameters to the anchor, or by a ``share`` of the way."""
        for part in self._parts:
            for value, p in part.views_of(part.anchor):
                p.copy_(value if share == 1.0 else torch.lerp(p.to(value.dtype), value, share))
        stepper_of(self._optimizer).restore()

    # State.

    @torch.no_grad()
    def move(self, communicator: Communicator) -> None:
        """Use the changed ``communicator``; a mean that was received is kept."""
        self._sent_before += self._sent()
        for part in self._parts:
            part.move(communicator)
        self._communicator, self._reduction = communicator, self._reduction_over(communicator)

    def state(self) -> dict[str, Any]:
        """Return views of anchors, velocities, unapplied means and this rank's residuals, by parameter."""
        found: dict[str, Any] = {"anchors": {}, "velocities": {}, "means": {}, "compression": {}}
        for part in self._parts:
            for what, flat in (("anchors", part.anchor), ("velocities", part.velocity), ("means", part.mean)):
                if flat is not None:
                    views = [view for view, _ in part.views_of(flat)]
                    found[what] |= dict(zip(part.names, views, strict=True))
            found["compression"] |= part.exchange.state()
        return found

    def shared(self) -> list[torch.Tensor]:
        """Return the tensors that are equal on all ranks."""
        flats = [flat for part in self._parts for flat in (part.anchor, part.velocity, part.mean)]
        return [flat for flat in flats if flat is not None]

    def resume(self, launched: int | None, num_meetings: int) -> None:
        """Set the counters, and allocate the mean of a meeting under way, for :meth:`load_state` to fill."""
        self.launched, self.num_meetings = launched, num_meetings
        for part in self._parts:
            part.mean = None if launched is None else torch.empty_like(part.anchor)

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the states of all fragments, as :meth:`state` returns them, after :meth:`resume`."""
        for part in self._parts:
            for what, flat in (("anchors", part.anchor), ("velocities", part.velocity), ("means", part.mean)):
                if flat is not None:
                    for name, (view, _) in zip(part.names, part.views_of(flat), strict=True):
                        view.copy_(state[what][name])
            own = {name: state["compression"][name] for name in part.names if name in state["compression"]}
            part.exchange.load_state(own)
