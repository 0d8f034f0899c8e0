"""What handles of ranks that average less often have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from pycomm import checks


class Averager(ABC):
    """Handle of :func:`local_sgd` and :func:`elastic_averaging`, kept alive by the optimizer's hook.

    Attributes:
        optimizer: the one after whose steps ranks meet.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._weight = 1.0
        self._hook: Any = optimizer.register_step_post_hook(self._stepped)

    @abstractmethod
    def _stepped(self, *_: object) -> None:
        """Do what is to be done after a step."""

    @property
    @abstractmethod
    def world(self) -> tuple[int, ...]:
        """Ranks that take part, by the numbers that they got when they came."""

    @abstractmethod
    def meet(self) -> None:
        """Meet now, whatever the number of steps."""

    @abstractmethod
    def take_center(self) -> None:
        """Overwrite the parameters with what the ranks have in common."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return counters: ``steps``, ``meetings``, ``bytes_sent`` and ``wait_seconds`` among them."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state, which loads with ``torch.load(weights_only=True)``."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned. The parameters stay as they are: load the model's own state."""

    @abstractmethod
    def _release(self) -> None:
        """Leave the others, and release what they had in common."""

    def set_weight(self, num_samples: float) -> None:
        """Weigh this rank by so many samples or tokens in the meetings from now on; all ranks count alike at first.

        Raises:
            TypeError, ValueError: ``num_samples`` is not a positive number.
        """
        self._require_attached()
        self._weight = checks.positive("num_samples", num_samples)

    def detach(self) -> None:
        """Meet no more; release the memory. Idempotent."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._release()

    def _require_attached(self) -> None:
        if self._hook is None:
            raise RuntimeError(f"this {type(self).__name__} is detached")
