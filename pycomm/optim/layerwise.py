"""Base of LARS and LAMB, whose steps are scaled parameter by parameter, for large batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.step_override import evaluate
from pycomm.optim.targets import Group, Target

EXCLUSIONS = ("one_dimensional", "all", "none")
"""Choices of parameters that get neither the ratio nor weight decay; biases and norm parameters have one dimension."""


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Optimizer that steps by pycomm's kernels or by torch's operations; see ``fused`` of :class:`LARS`."""

    def __init__(self, params: Any, fused: bool | None, **defaults: Any) -> None:
        self._fused = fused
        super().__init__(params, defaults)

    def check_group(self, group: Group) -> None:
        """Raise ValueError if a hyperparameter is out of range."""
        raise NotImplementedError

    def fused_step(self) -> None:
        """Step all parameters by the kernels."""
        raise NotImplementedError

    def plain_step(self, group: Group, target: Target) -> None:
        """Step one parameter by torch's operations: the reference that the kernels are compared with."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose options are checked; ValueError if one is out of range."""
        group = {**self.defaults, **param_group}
        self.check_group(group)
        if group["exclude"] not in EXCLUSIONS:
            raise ValueError(f"exclude is {group['exclude']!r}, wanted one of {', '.join(EXCLUSIONS)}")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return the loss that ``closure`` computes, if it is given."""
        loss = evaluate(closure)
        with torch.no_grad():
            if self._uses_kernels():
                self.fused_step()
                return loss
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.plain_step(group, Target(_wide(p), _wide(p.grad), self.state, p))
        return loss

    def _uses_kernels(self) -> bool:
        """Return whether the kernels do the step.

        Raises:
            TypeError: ``fused`` is true, and a parameter has a dtype that they do not support.
        """
        if self._fused is False:
            return False
        for p in optimizer_parameters(self):
            if p.dtype not in (torch.float32, torch.float64):
                if self._fused:
                    raise TypeError(
                        f"fused=True wants float32 or float64 parameters, one is {p.dtype}: see master_weights"
                    )
                return False
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fused": self._fused}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).setdefault("_fused", None)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in at least float32."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def require_not_negative(group: Group, *names: str) -> None:
    """Raise ValueError if a hyperparameter in ``names`` is negative or NaN."""
    for name in names:
        if not group[name] >= 0:  # written so that NaN fails
            raise ValueError(f"{name} is {group[name]}, wanted a number that is not negative")
