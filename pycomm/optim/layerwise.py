"""Base of LARS and LAMB, whose steps are scaled parameter by parameter, for large batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pycomm.optim import plans
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.shards import Shards, matched
from pycomm.optim.step_override import evaluate
from pycomm.optim.targets import Group, StepTarget
from pycomm.torch_internals import is_dtensor, local_of, note_writes

EXCLUSIONS = ("one_dimensional", "all", "none")
"""Choices of parameters that get neither the ratio nor weight decay; biases and norm parameters have one dimension."""


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Optimizer that steps by pycomm's kernels or by torch's operations; see ``fused`` of :class:`LARS`.

    Attributes:
        rule: rule of the kernels' steps.
    """

    rule: plans.Rule

    def __init__(self, params: Any, fused: bool | None, **defaults: Any) -> None:
        self._fused = fused
        super().__init__(params, defaults)

    def check_group(self, group: Group) -> None:
        """Raise ValueError if a hyperparameter is out of range."""
        raise NotImplementedError

    def direction(self, group: Group, target: StepTarget) -> torch.Tensor:
        """Return the tensor whose norm the step of ``target`` depends on, computed by torch's operations.

        This and :meth:`apply` are the reference that the kernels are compared with.
        """
        raise NotImplementedError

    def apply(
        self, group: Group, target: StepTarget, direction: torch.Tensor, norms: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the new weight of ``target``.

        Args:
            direction: what :meth:`direction` returned.
            norms: norms of the whole weight and of the whole direction, of the weight's dtype; ``None`` for a
                parameter that is excluded.
        """
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose options are checked; ValueError if one is out of range."""
        group = {**self.defaults, **param_group}
        self.check_group(group)
        if group["exclude"] not in EXCLUSIONS:
            raise ValueError(f"exclude is {group['exclude']!r}, wanted one of {', '.join(EXCLUSIONS)}")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return the loss that ``closure`` computes, if it is given.

        With parameters that are DTensors, it is collective over their meshes.
        """
        loss = evaluate(closure)
        with torch.no_grad():
            if self._uses_kernels():
                plans.step_by_rule(self, self.rule)
                return loss
            shards = Shards(optimizer_parameters(self))
            targets = self._targets()
            # Norms of DTensors take a message, one for all; without any, one direction at a time is kept.
            for some in [list(targets)] if shards else ([target] for target in targets):
                self._plain_steps(some, shards)
        return loss

    def _targets(self) -> Iterator[tuple[Group, StepTarget]]:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, StepTarget(_wide(p), _wide(matched(p.grad, p)), self.state, p)

    def _plain_steps(self, targets: list[tuple[Group, StepTarget]], shards: Shards) -> None:
        directions = [self.direction(group, target) for group, target in targets]
        adapting = [i for i, (group, target) in enumerate(targets) if adapts(group, target.weight)]
        norms = [torch.linalg.vector_norm(x) for i in adapting for x in (targets[i][1].weight, directions[i])]
        if shards:
            params = [targets[i][1].param for i in adapting for _ in range(2)]
            squares = torch.stack([norm.double() ** 2 for norm in norms]) if norms else torch.zeros(0).double()
            norms = list(shards.add_up(squares, params).sqrt())
        pairs = {i: torch.stack(norms[2 * at : 2 * at + 2]) for at, i in enumerate(adapting)}
        for i, (group, target) in enumerate(targets):
            pair = pairs[i].to(target.weight.dtype) if i in pairs else None
            local_of(target.param).copy_(self.apply(group, target, directions[i], pair))
            if is_dtensor(target.param):
                note_writes([target.param])

    def _uses_kernels(self) -> bool:
        """Return whether the kernels do the step."""
        if self._fused is False:
            return False
        for p in optimizer_parameters(self):
            if p.dtype not in (torch.float32, torch.float64):
                if self._fused:
                    raise TypeError(
                        f"fused=True requires float32 or float64 parameters, one is {p.dtype}: see master_weights"
                    )
                return False
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fused": self._fused}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).setdefault("_fused", None)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or this rank's part of it, in at least float32."""
    return local_of(tensor).detach().to(torch.promote_types(tensor.dtype, torch.float32))


def adapts(group: Group, weight: torch.Tensor) -> bool:
    """Return whether LARS and LAMB scale the step of ``weight`` by its norm, and decay it."""
    return bool(group["exclude"] == "none" or (group["exclude"] == "one_dimensional" and weight.dim() > 1))


def require_not_negative(group: Group, *names: str) -> None:
    """Raise ValueError if a hyperparameter in ``names`` is negative or NaN."""
    for name in names:
        if not group[name] >= 0:  # written so that NaN fails
            raise ValueError(f"{name} is {group[name]}, wanted a number that is not negative")
