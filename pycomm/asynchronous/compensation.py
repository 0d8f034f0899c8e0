"""Compensation of staleness: what is done to gradients of parameters that have been updated since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pycomm import checks


@dataclass(frozen=True)
class DelayCompensation:
    """DC-ASGD (Zheng et al., "Asynchronous SGD with Delay Compensation", 2017): g + λ g⊙g⊙(w_now - w_then).

    The product g⊙g stands for the diagonal of the Hessian. The server keeps the parameters that each worker has pulled.

    Args:
        strength: λ; with ``adaptive``, λ₀, not negative.
        adaptive: divide λ₀, element by element, by the square root of a moving mean of g⊙g.
        decay: of that mean, from 0 to below 1.
        eps: added to the mean, positive.

    Raises:
        TypeError, ValueError: an argument is wrong; it is named.
    """

    strength: float = 0.04
    adaptive: bool = False
    decay: float = 0.95
    eps: float = 1e-7

    def __post_init__(self) -> None:
        checks.real("strength", self.strength, 0.0)
        checks.flag("adaptive", self.adaptive)
        checks.real("decay", self.decay, 0.0, 1.0)
        checks.real("eps", self.eps, 0.0, or_equal=False)


class Compensator:
    """What a server does to stale gradients.

    Args:
        kind: ``None``, "lr" (the learning rate is divided by the staleness: Zhang et al., "Staleness-aware Async-SGD",
            2016), or delay compensation.
    """

    def __init__(self, kind: DelayCompensation | str | None) -> None:
        self._delay = kind if isinstance(kind, DelayCompensation) else None
        self._by_rate = kind == "lr"
        self._then: dict[int, torch.Tensor] = {}
        self._squares: torch.Tensor | None = None

    def pulled(self, worker: int, now: torch.Tensor) -> None:
        """Note that ``worker`` has the parameters ``now``."""
        if self._delay is None:
            return
        if worker in self._then:
            self._then[worker].copy_(now)
        else:
            self._then[worker] = now.clone()

    def leave(self, worker: int) -> None:
        """Forget ``worker``."""
        self._then.pop(worker, None)

    def weight(self, staleness: int) -> float:
        """Return the factor of the learning rate for a gradient."""
        return 1.0 / max(staleness, 1) if self._by_rate else 1.0

    def compensate(self, worker: int, gradient: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        """Return the gradient that ``worker`` would have had with the parameters ``now``, as far as one can tell."""
        if self._delay is None:
            return gradient
        delay, square = self._delay, gradient * gradient
        strength: float | torch.Tensor = delay.strength
        if delay.adaptive:
            if self._squares is None:
                self._squares = torch.zeros_like(square)
            self._squares.mul_(delay.decay).add_(square, alpha=1 - delay.decay)
            strength = delay.strength / (self._squares + delay.eps).sqrt()
        then = self._then.get(worker)
        return gradient if then is None else gradient + strength * square * (now - then)

    def state(self) -> dict[str, Any]:
        """Return what a server that begins again has to know."""
        return {"then": dict(self._then), "squares": self._squares}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state` gave."""
        self._then, self._squares = dict(state["then"]), state["squares"]


def checked_compensation(value: Any) -> DelayCompensation | str | None:
    """Return what the argument ``compensation`` means. Raise ValueError for anything else."""
    if value is None or isinstance(value, DelayCompensation):
        return value
    if value in ("lr", "dc"):
        return "lr" if value == "lr" else DelayCompensation()
    raise ValueError(f'compensation is {value!r}, wanted None, "lr", "dc" or a pycomm.DelayCompensation')
