"""Modes of a parameter server: which gradients make an update, which workers wait, and how stale gradients count.

Users pass a frozen dataclass, from which each server makes its own rules. Rules know no tensors and no connections:
a server asks them, and notifies them of what it has done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from pycomm import checks


@dataclass(frozen=True, kw_only=True)
class Mode(ABC):
    """Base class of the ``mode`` of :func:`pycomm.parameter_server`; attributes: see :class:`pycomm.Async`."""

    compensation: str | None = None
    strength: float = 0.04
    adaptive: bool = False
    decay: float = 0.95
    eps: float = 1e-7

    @abstractmethod
    def rules(self) -> Rules:
        """Return the rules of one server."""

    def _check_compensation(self) -> None:
        value: Any = self.compensation
        if value is not None and not (isinstance(value, str) and value in ("lr", "dc")):
            raise ValueError(f'compensation is {checks.shown(value)}, wanted None, "lr" or "dc"')
        checks.real("strength", self.strength, 0.0)
        checks.flag("adaptive", self.adaptive)
        checks.real("decay", self.decay, 0.0, 1.0)
        checks.real("eps", self.eps, 0.0, or_equal=False)
        for name in ("strength", "adaptive", "decay", "eps"):
            if value != "dc" and getattr(self, name) != getattr(type(self), name):
                raise ValueError(f'{name}={getattr(self, name)} with compensation={value!r}, wanted "dc" there')


@dataclass(frozen=True)
class Async(Mode):
    """Every gradient is an update, and no worker waits.

    Args:
        compensation: correction of stale gradients, whose parameters were updated after they were pulled. "lr": the
            learning rate is divided by the number of those updates (Zhang et al., "Staleness-aware Async-SGD", 2016).
            "dc": DC-ASGD (Zheng et al., "Asynchronous SGD with Delay Compensation", 2017): g + λ g⊙g⊙(w_now - w_then),
            where g⊙g approximates the diagonal of the Hessian. The server keeps the parameters that each worker pulled.
        strength: λ of "dc"; with ``adaptive``, λ₀, not negative.
        adaptive: divide λ₀, element by element, by the square root of a moving mean of g⊙g.
        decay: of that mean, from 0 to below 1.
        eps: added to the mean, positive.

    Raises:
        TypeError, ValueError: an argument is wrong; it is named.
    """

    compensation: str | None = None  # the only positional argument

    def __post_init__(self) -> None:
        self._check_compensation()

    def rules(self) -> Rules:
        return AsyncRules()


@dataclass(frozen=True)
class StaleSynchronous(Mode):
    """Every gradient is an update; no worker is more than ``staleness`` gradients ahead of another (Ho et al., 2013).

    Args:
        staleness: the bound, at least 1.
        compensation, strength, adaptive, decay, eps: as of :class:`pycomm.Async`.

    Raises:
        TypeError, ValueError: an argument is wrong; it is named.
    """

    staleness: int

    def __post_init__(self) -> None:
        checks.integer("staleness", self.staleness, 1)
        self._check_compensation()

    def rules(self) -> Rules:
        return StaleSynchronousRules(self.staleness)


@dataclass(frozen=True)
class Sync(Mode):
    """An update is the mean of one gradient from each worker, or from all but ``backup`` of them (Chen et al., 2016).

    Later gradients are dropped. With a ``quorum`` (n-softsync: Zhang et al., 2016), an update is the mean of so many
    gradients, of any workers: nobody waits, and none is dropped.

    Args:
        backup: number of workers that an update does not wait for; less than the number of workers.
        quorum: number of gradients, at least 1; not together with ``backup``.
        compensation, strength, adaptive, decay, eps: as of :class:`pycomm.Async`; with a ``quorum`` only, as otherwise
            no gradient is stale.

    Raises:
        TypeError, ValueError: an argument is wrong; it is named.
    """

    backup: int = 0
    quorum: int | None = None

    def __post_init__(self) -> None:
        checks.integer("backup", self.backup, 0)
        self._check_compensation()
        if self.quorum is None:
            if self.compensation is not None:
                raise ValueError(f"compensation={self.compensation!r} without a quorum: no gradient is stale then")
            return
        checks.integer("quorum", self.quorum, 1)
        if self.backup > 0:
            raise ValueError(f"backup={self.backup} with quorum={self.quorum}: nobody is waited for then")

    def rules(self) -> Rules:
        return SyncRules(self.backup) if self.quorum is None else SoftSyncRules(self.quorum)


_SHORT = {"async": Async(), "sync": Sync()}


def checked_mode(mode: Any) -> Mode:
    """Return ``mode``, or the mode of that name without options. Raise TypeError or ValueError otherwise."""
    if isinstance(mode, Mode):
        return mode
    if isinstance(mode, str) and mode in _SHORT:
        return _SHORT[mode]
    wanted = '"async", "sync", a pycomm.Async, StaleSynchronous or Sync'
    raise (ValueError if isinstance(mode, str) else TypeError)(f"mode is {checks.shown(mode)}, wanted {wanted}")


class Rules(ABC):
    """Rules of one server.

    Attributes:
        workers: numbers of the workers that take part.
        num_collected: number of gradients collected for the next update.
    """

    def __init__(self) -> None:
        self.workers: set[int] = set()
        self.num_collected = 0

    def join(self, worker: int) -> None:
        self.workers.add(worker)

    def leave(self, worker: int) -> None:
        self.workers.discard(worker)

    def may_pull(self, worker: int) -> bool:
        """Return whether ``worker`` may get the parameters now, or must wait."""
        return True

    def push(self, worker: int, staleness: int) -> bool:
        """Return whether a gradient counts that was computed ``staleness`` updates ago."""
        self.num_collected += 1
        return True

    @abstractmethod
    def is_due(self) -> bool:
        """Return whether the collected gradients make an update now."""

    def updated(self) -> None:
        """Note that the update was made."""
        self.num_collected = 0

    def state(self) -> dict[str, Any]:
        return {"collected": self.num_collected, "workers": sorted(self.workers)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.num_collected, self.workers = state["collected"], set(state["workers"])


class AsyncRules(Rules):
    """Rules of :class:`Async`."""

    def is_due(self) -> bool:
        return self.num_collected > 0


class SoftSyncRules(Rules):
    """Rules of :class:`Sync` with a quorum: gradients of any age count."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def is_due(self) -> bool:
        return self.num_collected >= self._count


class StaleSynchronousRules(AsyncRules):
    """Rules of :class:`StaleSynchronous`."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self._bound = bound
        self._clocks: dict[int, int] = {}

    def join(self, worker: int) -> None:
        """Add ``worker``, with as many gradients as the slowest one."""
        if worker not in self.workers:
            self._clocks[worker] = min((self._clocks[w] for w in self.workers), default=0)
        super().join(worker)

    def leave(self, worker: int) -> None:
        super().leave(worker)
        self._clocks.pop(worker, None)

    def may_pull(self, worker: int) -> bool:
        return self._clocks[worker] - min(self._clocks.values()) <= self._bound

    def push(self, worker: int, staleness: int) -> bool:
        self._clocks[worker] += 1
        return super().push(worker, staleness)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "clocks": dict(self._clocks)}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._clocks = dict(state["clocks"])


class SyncRules(Rules):
    """Rules of :class:`Sync` without a quorum: gradients of earlier parameters do not count."""

    def __init__(self, backup: int) -> None:
        super().__init__()
        self._backup = backup
        self._done: set[int] = set()

    def leave(self, worker: int) -> None:
        super().leave(worker)
        self._done.discard(worker)

    def may_pull(self, worker: int) -> bool:
        return worker not in self._done

    def push(self, worker: int, staleness: int) -> bool:
        if staleness > 0:
            return False
        self._done.add(worker)
        return super().push(worker, staleness)

    def is_due(self) -> bool:
        return self.num_collected >= max(1, len(self.workers) - self._backup)

    def updated(self) -> None:
        super().updated()
        self._done.clear()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "done": sorted(self._done)}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._done = set(state["done"])


class Compensator:
    """Correction of stale gradients on a server, by the ``compensation`` of its ``mode``."""

    def __init__(self, mode: Mode) -> None:
        self._mode, self._is_delayed = mode, mode.compensation == "dc"
        self._then: dict[int, torch.Tensor] = {}
        self._squares: torch.Tensor | None = None

    def pulled(self, worker: int, now: torch.Tensor) -> None:
        """Note that ``worker`` got the parameters ``now``."""
        if not self._is_delayed:
            return
        if worker in self._then:
            self._then[worker].copy_(now)
        else:
            self._then[worker] = now.clone()

    def leave(self, worker: int) -> None:
        self._then.pop(worker, None)

    def weight(self, staleness: int) -> float:
        """Return the factor of the learning rate for a gradient."""
        return 1.0 / max(staleness, 1) if self._mode.compensation == "lr" else 1.0

    def compensate(self, worker: int, gradient: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        """Return an approximation of the gradient of ``worker`` with the parameters ``now``."""
        if not self._is_delayed:
            return gradient
        mode, square = self._mode, gradient * gradient
        strength: float | torch.Tensor = mode.strength
        if mode.adaptive:
            if self._squares is None:
                self._squares = torch.zeros_like(square)
            self._squares.mul_(mode.decay).add_(square, alpha=1 - mode.decay)
            strength = mode.strength / (self._squares + mode.eps).sqrt()
        then = self._then.get(worker)
        return gradient if then is None else gradient + strength * square * (now - then)

    def state(self) -> dict[str, Any]:
        return {"then": dict(self._then), "squares": self._squares}

    def load_state(self, state: dict[str, Any]) -> None:
        self._then, self._squares = dict(state["then"]), state["squares"]
