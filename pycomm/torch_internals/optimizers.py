"""Optimizers and torch's GradScaler."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch


def replace_step(
    optimizer: torch.optim.Optimizer, step: Callable[[torch.optim.Optimizer, Any], Any], under_scheduler: bool
) -> MethodType:
    """Replace the ``step`` of this one object by ``step(optimizer, closure)``, called between the optimizer's hooks.

    Args:
        under_scheduler: whether a scheduler has wrapped the old one; it warns if its marks are missing on
            the new one.
    """

    def marked(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if under_scheduler:
            self._opt_called = True  # type: ignore[attr-defined]
        return step(self, closure)

    hooked: Any = torch.optim.Optimizer.profile_hook_step(marked)
    if under_scheduler:
        hooked._wrapped_by_lr_sched = True
    method = vars(optimizer)["step"] = MethodType(hooked, optimizer)
    return method


def wrapped_by_scheduler(step: Any) -> Any:
    """Return the function that ``step`` wraps if it is a learning-rate scheduler's wrapper; else ``None``."""
    if not hasattr(step, "_wrapped_by_lr_sched"):
        return None
    # The wrapper of torch 2.4 has no __wrapped__.
    return getattr(step, "__wrapped__", None) or inspect.getclosurevars(step).nonlocals.get("func")


def unhooked_step(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return ``step`` as ``cls`` defines it, without the hooks that torch puts around it."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def leave_scale_to_step(optimizer: torch.optim.Optimizer) -> Any:
    """Make GradScaler pass its factor to ``step`` instead of dividing; return the old mark, to undo this."""
    before = vars(optimizer).get("_step_supports_amp_scaling")
    vars(optimizer)["_step_supports_amp_scaling"] = True
    return before


def undo_leave_scale_to_step(optimizer: torch.optim.Optimizer, before: Any) -> None:
    """Undo :func:`leave_scale_to_step`, which had returned ``before``."""
    del vars(optimizer)["_step_supports_amp_scaling"]
    if before is not None:
        vars(optimizer)["_step_supports_amp_scaling"] = before


def move_hook(handle: Any, *, last: bool) -> None:
    """Make the hook that ``handle`` can remove the last one of its optimizer, or the first."""
    hooks = handle.hooks_dict_ref()
    if hooks and next(reversed(hooks) if last else iter(hooks)) != handle.id:
        hooks.move_to_end(handle.id, last=last)


def take_scale(optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return GradScaler's scale, by which this step must divide, and a tensor that is not 0 if it found infinities.

    ``None`` where GradScaler set none. Both are removed from the optimizer, as torch's own steps would apply them
    again, or refuse them.
    """
    holder: Any = optimizer
    scale, found = getattr(holder, "grad_scale", None), getattr(holder, "found_inf", None)
    if scale is not None:
        holder.grad_scale = None
    if found is not None:
        holder.found_inf = None
    return scale, found


def watch_grad_scalers(
    is_watched: Callable[[torch.optim.Optimizer], bool],
    skipped: Callable[[torch.optim.Optimizer], None],
    is_left_out: Callable[[torch.optim.Optimizer], bool],
) -> None:
    """Call ``skipped`` whenever a GradScaler skips the step of an optimizer that ``is_watched``. Permanent, idempotent.

    A scaler that skips a step does not call the optimizer, so none of its hooks runs: hence the wrapper around
    ``GradScaler.step``, which subclasses (of FSDP, Accelerate, Lightning) inherit. It refuses a step without gradients,
    unless the step ``is_left_out`` on purpose.
    """
    plain = torch.amp.GradScaler.step
    if hasattr(plain, "_tells_pycomm"):
        return

    @functools.wraps(plain)
    def step(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled() or not is_watched(optimizer):
            return plain(self, optimizer, *args, **kwargs)
        if is_left_out(optimizer):
            _find_nothing_infinite(self, optimizer)
        calls: list[bool] = []
        handle = optimizer.register_step_pre_hook(lambda *_: calls.append(True))
        try:
            result = plain(self, optimizer, *args, **kwargs)
        finally:
            handle.remove()
        if not calls:
            skipped(optimizer)
        return result

    step._tells_pycomm = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.step = step  # type: ignore[method-assign]


def _find_nothing_infinite(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Make ``scaler`` take ``optimizer``, which has no gradients, for one whose gradients are finite and unscaled."""
    if all(param.grad is None for group in optimizer.param_groups for param in group["params"]):
        device = optimizer.param_groups[0]["params"][0].device
        scaler.scale(torch.zeros((), device=device))  # which makes the scale, if this is the first step
        state = scaler._per_optimizer_states[id(optimizer)]
        state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED
        state["found_inf_per_device"] = {device: torch.zeros((), device=device)}
