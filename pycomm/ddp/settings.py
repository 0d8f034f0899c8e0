"""Settings of a registration, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pycomm.compression import Compression
from pycomm.cost.auto import checked_method
from pycomm.optim.loss_scaler import checked_scaler
from pycomm.optim.parameters import unwrapped


@dataclass(frozen=True)
class Settings:
    """Arguments of a registration; equal on all ranks."""

    method: Compression
    loss_scaler: Any
    algorithm: str

    def lines(self) -> list[str]:
        """Return one line per setting, to be compared between the ranks."""
        return [
            f"compression={self.method!r}",
            f"loss_scaler={type(self.loss_scaler).__name__}",
            f"algorithm={self.algorithm}",
        ]


def checked_settings(compression: Any, loss_scaler: Any, optimizer: Any, algorithm: Any) -> Settings:
    """Return the arguments of a registration as checked settings.

    Raises:
        TypeError, ValueError: an argument is wrong, or the method does not suit the optimizer.
    """
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm is {algorithm!r}, wanted a name")
    settings = Settings(checked_method(compression), checked_scaler(loss_scaler), algorithm)
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}, wanted a torch.optim.Optimizer or None")
        settings.method.check(unwrapped(optimizer))
    return settings
