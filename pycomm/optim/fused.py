"""Steps of torch's own optimizers by pycomm's kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from pycomm.collectives.layout import on_gpu, require_dense
from pycomm.kernels.arrays import PackScaling
from pycomm.optim import update_rules
from pycomm.optim.lamb import LAMB
from pycomm.optim.lars import LARS
from pycomm.optim.parameters import optimizer_parameters, unwrapped
from pycomm.optim.partition import Partition
from pycomm.optim.pending_factor import FactorStep, refuse_closure
from pycomm.optim.plans import Rule, forget_plans, step_by_rule
from pycomm.optim.step_override import evaluate, require_own_step
from pycomm.torch_internals import local_of, take_scale

RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: update_rules.sgd,
    torch.optim.Adam: update_rules.adam,
    torch.optim.AdamW: update_rules.adamw,
    torch.optim.RMSprop: update_rules.rmsprop,
    torch.optim.Adagrad: update_rules.adagrad,
    LARS: update_rules.lars,
    LAMB: update_rules.lamb,
}
"""Rule by which the kernels step for each optimizer; by exact class, since a subclass may step differently."""


def fuse(optimizer: torch.optim.Optimizer) -> FusedStep:
    """Replace the ``step`` of ``optimizer`` by one kernel that unscales, clips, decays and updates in one pass.

    Works for torch's SGD, Adam, AdamW, RMSprop and Adagrad, and for LARS and LAMB, with float32 or
    float64 parameters. Results match torch's up to rounding; state, hyperparameters and checkpoints keep torch's
    form. The factors of ``pycomm.LossScaler`` and ``Reducer.clip_grad_norm`` are applied inside the step,
    without a pass of their own, so ``.grad`` stays unchanged, and must not be changed in between. For half-precision
    parameters use :func:`pycomm.master_weights`, which includes this.

    Returns:
        A handle whose ``detach()`` gives the optimizer its own ``step`` back. It need not be kept.

    Raises:
        TypeError: the optimizer is none of these classes, or a subclass of one; a parameter has another dtype.
        ValueError: ``differentiable`` or ``capturable`` is set; a parameter has gaps or overlaps in memory.
        RuntimeError: the ``step`` of the optimizer has already been replaced.
    """
    optimizer = unwrapped(optimizer)
    require_fusable(optimizer)
    for p in optimizer_parameters(optimizer):
        if p.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"a parameter has dtype {p.dtype}, wanted float32 or float64: see pycomm.master_weights")
        require_dense(local_of(p))
    return FusedStep(optimizer)


def require_fusable(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError, ValueError or RuntimeError if :func:`fuse` would, whatever the parameters."""
    rule_of(optimizer)
    require_own_step(optimizer)


class KernelStep(FactorStep):
    """Step by pycomm's kernels, which multiply the gradients by the pending factors.

    Attributes:
        partition: partition of the step over ranks; ``None`` if this rank steps all elements.
    """

    partition: Partition | None = None

    def run(self, closure: Callable[[], Any] | None) -> Any:
        if self.partition is not None:
            refuse_closure(closure)
        loss = evaluate(closure)
        rule = rule_of(self.optimizer)
        scaling = self.take_scaling(waits=any(map(rule.waits, self.optimizer.param_groups)))
        with self._together(scaling) as is_taken:
            if scaling is None or not is_taken:
                self.forget()
            else:
                with torch.no_grad():
                    self.update(rule, scaling)
        return loss

    def _together(self, scaling: PackScaling | None) -> contextlib.AbstractContextManager[bool]:
        if self.partition is None:
            return contextlib.nullcontext(scaling is not None)
        factor = 1.0 if scaling is None else scaling.factor
        return self.partition.step(self.optimizer, factor, is_skipped=scaling is None)

    def update(self, rule: Rule, scaling: PackScaling) -> None:
        """Step all parameters that have a gradient, which is scaled first."""
        step_by_rule(self.optimizer, rule, scaling, partition=self.partition)

    def share(self, partition: Partition) -> None:
        """Partition later steps over ranks."""
        self.partition = partition

    def take_whole(self, completed: Callable[[dict[str, Any], torch.Tensor], dict[str, Any]] | None) -> None:
        """Replace the state of this rank's elements by whole state.

        Args:
            completed: returns the whole state of a parameter, given this rank's; ``None``: drop the state.
        """
        for param, entry in self.optimizer.state.items():
            if completed is None:
                entry.clear()
            else:
                entry.update(completed(entry, param))

    def step_alone(self) -> None:
        """Step all elements on this rank from now on, with state in its own memory."""
        self.partition = None
        forget_plans(self.optimizer)
        for entry in self.optimizer.state.values():
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    entry[key] = value.clone(memory_format=torch.preserve_format)

    def take_scaling(self, waits: bool) -> PackScaling | None:
        """Return the pending factor with GradScaler's scale for this step; ``None`` if it found infinities.

        Values on a GPU stay there, for the kernels to read, unless the step ``waits``.
        """
        factor = self._pending.take()
        scale, found = take_scale(self.optimizer)
        if found is not None and not waits and on_gpu(found):
            return PackScaling(factor, scale, found)
        if found is not None and bool(found):
            return None
        return PackScaling(factor if scale is None else factor / float(scale))


class FusedStep(KernelStep):
    """Handle of a fused optimizer, made by :func:`fuse`."""


def has_rule(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the kernels step for the class of ``optimizer``, if its options permit."""
    return type(optimizer) in RULES


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule by which the kernels step for ``optimizer``."""
    rule = RULES.get(type(optimizer))
    if rule is None:
        known = ", ".join(sorted(known.__name__ for known in RULES))
        raise TypeError(
            f"optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}, wanted one of {known}"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("differentiable=True: kernels record no gradients")
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise ValueError("capturable=True: the step count is on the CPU here")
    return rule
