"""Steps by pycomm's kernels for torch's own optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from pycomm.layout import require_dense
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.step_override import Takeover, evaluate, takeover_of
from pycomm.optim.update_rules import RULES, Batch, Group, Rule, Scratches, Target, flip

_O = TypeVar("_O", bound=torch.optim.Optimizer)
_scratches: WeakKeyDictionary[torch.optim.Optimizer, Scratches] = WeakKeyDictionary()

Factor = float | torch.Tensor


def fuse(optimizer: _O) -> _O:
    """Let one kernel do ``optimizer``'s steps: unscale, clip, decay, update, every array touched once.

    For torch's SGD, Adam, AdamW and RMSprop with float32 or float64 parameters; the results are torch's
    up to rounding, and so are state, hyperparameters and checkpoints. The factors of
    ``pycomm.LossScaler`` and ``Reducer.clip_grad_norm`` are applied inside the step, without a pass of
    their own: ``.grad`` keeps the gradients as they came. Half-precision parameters:
    :func:`pycomm.master_weights`, which does this too.

    Returns:
        ``optimizer``, the same object.

    Raises:
        TypeError: another optimizer, or a subclass of these; other dtypes.
        ValueError: ``differentiable`` or ``capturable``; a parameter with gaps or overlaps in memory.
        RuntimeError: its ``step`` has been replaced already.
    """
    rule_of(optimizer)
    for p in optimizer_parameters(optimizer):
        if p.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"a parameter has dtype {p.dtype}, wanted float32 or float64: see pycomm.master_weights")
        require_dense(p)
    FusedStep(optimizer)
    return optimizer


class FusedStep(Takeover):
    """What :func:`fuse` puts in the place of ``step``.

    Attributes:
        pending: what the gradients of the next step still have to be multiplied with.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.pending: Factor = 1.0

    def run(self, closure: Callable[[], Any] | None) -> Any:
        loss = evaluate(closure)
        factor, found = self.take_factor()
        if found:
            self.forget()
        else:
            with torch.no_grad():
                self.update(factor)
        return loss

    def update(self, factor: Factor) -> None:
        step_by_rule(self.optimizer, rule_of(self.optimizer), factor)

    def forget(self) -> None:
        """Drop what was left for a step that will not be taken."""
        self.pending = 1.0

    def take_factor(self) -> tuple[Factor, bool]:
        """What is pending, times GradScaler's factor if it left that to this step; whether it found infinities."""
        factor, self.pending = self.pending, 1.0
        found = getattr(self.optimizer, "found_inf", None)
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is not None:
            factor = factor / float(scale)
            # Taken: torch's own steps would apply it again, or refuse it.
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        if found is not None:
            self.optimizer.found_inf = None  # type: ignore[attr-defined]
        return factor, found is not None and bool(found)


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """TypeError or ValueError where there is none."""
    rule = RULES.get(type(optimizer))
    if rule is None:
        known = ", ".join(sorted(known.__name__ for known in RULES))
        raise TypeError(
            f"optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}, wanted one of {known}"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("differentiable=True: kernels record no gradients")
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise ValueError("capturable=True: the count of steps is on the CPU here")
    return rule


def fused_step_of(optimizer: torch.optim.Optimizer) -> FusedStep | None:
    """Where the factors of unscaling and clipping may be left for the next step."""
    found = takeover_of(optimizer)
    return found if isinstance(found, FusedStep) else None


def step_by_rule(
    optimizer: torch.optim.Optimizer,
    rule: Rule,
    factor: Factor = 1.0,
    masters: Mapping[torch.Tensor, torch.Tensor] | None = None,
    grads: Mapping[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """One step of every parameter that has a gradient.

    Args:
        factor: gradients are multiplied with this first.
        masters: of parameters, those that are updated in their place, and cast back.
        grads: instead of ``.grad``, for parameters that are in here.
    """
    scratches = _scratches.setdefault(optimizer, Scratches())
    for number, group in enumerate(optimizer.param_groups):
        written: list[torch.Tensor] = []
        for key, targets in _targets(optimizer, group, masters or {}, grads or {}).items():
            rule(group, Batch(targets, flip(group, factor), scratches, f"{number} {key}"))
            written += [t for target in targets for t in (target.weight, target.copy) if t is not None]
        for tensor in written:
            torch.autograd.graph.increment_version(tensor)


def _targets(
    optimizer: torch.optim.Optimizer,
    group: Group,
    masters: Mapping[torch.Tensor, torch.Tensor],
    grads: Mapping[torch.Tensor, torch.Tensor],
) -> dict[Any, list[Target]]:
    """Those with a gradient, by what one kernel call can take."""
    targets: dict[Any, list[Target]] = defaultdict(list)
    for p in group["params"]:
        grad = grads.get(p, p.grad)
        if grad is None:
            continue
        if grad.layout != torch.strided:
            raise ValueError(f"a gradient of shape {list(p.shape)} is sparse; fused steps want dense ones")
        require_dense(p)
        weight = masters.get(p, p)
        target = Target(weight, grad, optimizer.state, p, p.detach() if p in masters else None)
        targets[weight.dtype, p.device, p in masters].append(target)
    return targets
