"""Master weights: float32 copies of half-precision parameters, which the optimizer updates in their place.

A step often changes a weight by a thousandth or less. float16 has 11 significant bits and bfloat16 8, so
such a step is lost to rounding (Micikevicius et al., "Mixed Precision Training", 2018, section 3.1). The
model keeps its half-precision parameters; the optimizer updates the float32 copies and casts them back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from pycomm import kernels
from pycomm.collectives.layout import laid_out_like
from pycomm.kernels.arrays import PackScaling
from pycomm.optim.fused import RULES, KernelStep, rule_of
from pycomm.optim.master_state import KEY, Masters, check_half
from pycomm.optim.parameters import checked_optimizer, optimizer_parameters
from pycomm.optim.pending_factor import refuse_closure
from pycomm.optim.plans import Rule, step_by_rule
from pycomm.optim.shards import matched
from pycomm.optim.step_override import HALF, Factor, evaluate, own_step
from pycomm.optim.unscaled import UnscaledGradients
from pycomm.torch_internals import (
    dtensor_around,
    is_dtensor,
    leave_scale_to_step,
    local_of,
    undo_leave_scale_to_step,
)


def master_weights(optimizer: torch.optim.Optimizer) -> MasterWeights:
    """Give the float16 and bfloat16 parameters of any ``optimizer`` float32 masters.

    The optimizer remains the same object, with the model's own parameters in its groups: ``zero_grad``,
    schedulers, hooks and ``attach`` work as before. Its state is float32. ``step()`` updates the masters
    and casts them back, in one kernel for torch's SGD, Adam, AdamW and RMSprop and for LARS and LAMB; for
    all other optimizers, their own ``step`` runs on the masters. ``state_dict()`` contains the masters in
    each parameter's state under "master_weight", and ``load_state_dict`` keeps everything in float32. If
    other code writes to a parameter (``model.load_state_dict``, for example), elements that differ from their
    master are copied to it. In-place writes through ``param.data`` are not detected, as in autograd.

    Call it after the model was cast (``model.half()``) and before ``attach``.

    Returns:
        A handle with ``parameters()``, for clipping code of your own, and ``detach()``.

    Raises:
        TypeError: ``optimizer`` is not a torch optimizer; or a half-precision parameter is a DTensor, and no kernels
            step it.
        RuntimeError: its ``step`` has already been replaced.
        ValueError: a parameter has gaps in memory.
    """
    return MasterWeights(checked_optimizer(optimizer))


_STEPPED = RULES.keys() - {torch.optim.Adagrad}
"""Optimizers whose masters the kernels step. Not Adagrad: it is for sparse gradients, which kernels do not accept."""


class MasterWeights(KernelStep):
    """Handle of an optimizer with float32 masters, made by :func:`master_weights`."""

    has_masters = True
    _take: Callable[[Factor, bool], None] | None = None  # by ranks together

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._unscaled = UnscaledGradients()
        self._rule = rule_of(optimizer) if type(optimizer) in _STEPPED else None
        self._masters = Masters(optimizer, self._rule)
        self.has_kernels = self._rule is not None
        for param in filter(lambda p: p.dtype in HALF, optimizer_parameters(optimizer)):
            check_half(param, optimizer, self._rule)
        super().__init__(optimizer, self._masters)
        self._masters.add(optimizer_parameters(optimizer))
        # GradScaler.unscale_() refuses float16; with this mark its step() leaves the factor to ours.
        self._old_mark = leave_scale_to_step(optimizer)
        vars(optimizer)["load_state_dict"] = self._load_state_dict
        self._hook = optimizer.register_state_dict_post_hook(self._add_masters)

    def parameters(self) -> list[torch.Tensor]:
        """Return the tensors that steps update, in the order of the groups: masters, or parameters without one.

        After ``LossScaler.unscale_`` the masters have their unscaled gradients in ``.grad``, in float32.
        """
        return [self.master_of(p) for p in optimizer_parameters(self.optimizer)]

    def master_of(self, param: torch.Tensor) -> torch.Tensor:
        """Return the master of ``param``; ``param`` itself if it is not half-precision."""
        self._masters.add([param])
        return self._masters.get(param, param)

    def masters(self, leaves_out: Callable[[torch.Tensor], bool] = lambda _: False) -> list[torch.Tensor]:
        """Return the masters, updated by writes to their parameters, except masters of parameters to leave out."""
        self._masters.refresh(self.partition)
        params = [param for param in optimizer_parameters(self.optimizer) if param in self._masters]
        return [self._masters[param] for param in params if not leaves_out(param)]  # in an order that all ranks have

    def restore(self) -> None:
        self._masters.restore()

    def detach(self) -> None:
        """Give the optimizer its own ``step`` back, and cast its state to the parameters' dtypes. Idempotent."""
        attributes = vars(self.optimizer)
        if attributes.get("load_state_dict") is not None:
            del attributes["load_state_dict"]
            undo_leave_scale_to_step(self.optimizer, self._old_mark)
            self._hook.remove()
            for param in self._masters:
                self._masters.cast_state(param, param.dtype)
        super().detach()

    # Steps.

    def run(self, closure: Callable[[], Any] | None) -> Any:
        if self._rule is not None and self._take is None:
            return super().run(closure)
        if self._take is not None:
            refuse_closure(closure)
        scaling = self.take_scaling(waits=True)
        if self._take is not None:
            self._masters.refresh(None)
            self._take(1.0 if scaling is None else scaling.factor, scaling is None)
        if scaling is None:
            self.forget()
        if scaling is None or self._take is not None:
            return evaluate(closure)
        # An optimizer may call its closure several times, each time with half-precision parameters and new gradients.
        self._masters.refresh(self.partition)
        with self._masters.widened(self._unscaled.current(by_value=True), scaling.factor, self._after_step) as widen:

            def narrow_closure() -> Any:
                assert closure is not None
                widen(False)
                try:
                    return evaluate(closure)
                finally:
                    self._masters.refresh(self.partition)  # a closure may write to parameters
                    widen(True)

            return own_step(self.optimizer, None if closure is None else narrow_closure)

    def update(self, rule: Rule, scaling: PackScaling) -> None:
        self._masters.refresh(self.partition)
        if self.partition is not None:
            self._masters.move_home(self.partition)
        unscaled = self._unscaled.current(by_value=True)
        step_by_rule(self.optimizer, rule, scaling, self._masters, unscaled, self.partition)
        self._after_step()

    def unscale(self, factor: Factor) -> None:
        """Store gradients times ``factor`` in ``.grad`` of :meth:`parameters`; gradients of masters in float32."""
        self._masters.refresh(self.partition)
        for param in optimizer_parameters(self.optimizer):
            if param.grad is None:
                continue
            if param in self._masters:
                master = self._masters[param]
                self._unscaled.put(param, master, _packed(param.grad, master, factor), param.grad)
            else:
                local_of(param.grad).data.mul_(factor)  # as Stepper.unscale does
        self._unscaled.seal()

    def unscaled(self) -> dict[torch.Tensor, torch.Tensor] | None:
        grads = self._unscaled.current()
        if not grads:
            return None
        return {p: grads.get(p, p.grad) for p in optimizer_parameters(self.optimizer) if p.grad is not None}

    def has_written_unscaled(self) -> bool:
        return self._unscaled.are_written()

    def forget(self) -> None:
        super().forget()
        self._unscaled.clear()
        for master in self._masters.values():
            master.grad = None

    def _after_step(self) -> None:
        self.forget()
        self._masters.stamp_all()

    def take_whole(self, completed: Callable[[dict[str, Any], torch.Tensor], dict[str, Any]] | None) -> None:
        super().take_whole(completed)
        for param, master in self._masters.items():
            # If parts are lost, masters are copied from the parameters again.
            made = param.detach().float() if completed is None else completed({KEY: master}, param)[KEY]
            self._masters[param] = made

    def step_alone(self) -> None:
        super().step_alone()
        for param, master in self._masters.items():
            self._masters.put(param, master.clone(memory_format=torch.preserve_format))
        self._masters.refresh(None)

    def whole_steps(self) -> WholeMasters:
        """Return these steps for ranks that step together, each its own parameters as a whole."""
        take_together = functools.partial(setattr, self, "_take")
        return WholeMasters(self._masters, self._unscaled, self._after_step, take_together)

    # State.

    def _add_masters(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        self._masters.refresh(self.partition)
        for index, param in enumerate(optimizer_parameters(optimizer)):
            if param in self._masters:
                state_dict["state"][index] = {**state_dict["state"].get(index, {}), KEY: self._masters[param]}

    def _load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load by torch's method with masters in place of parameters, so that nothing is cast to half precision."""
        self._masters.refresh(self.partition)
        self._masters.load(state_dict, self.partition, self._unscaled.current(by_value=True), self._after_step)


class WholeMasters:
    """Masters that an optimizer's own step updates, of whole parameters that this rank owns."""

    def __init__(
        self,
        masters: Masters,
        unscaled: UnscaledGradients,
        done: Callable[[], None],
        take_together: Callable[[Callable[[Factor, bool], None] | None], None],
    ) -> None:
        self._masters, self._unscaled, self._done = masters, unscaled, done
        self.take_together = take_together

    @contextlib.contextmanager
    def stepped(self, factor: Factor) -> Iterator[None]:
        with self._masters.widened(self._unscaled.current(by_value=True), factor, self._done):
            yield

    def entry_of(self, param: torch.Tensor) -> dict[str, Any]:
        entry: dict[str, Any] = self._masters.optimizer.state.get(param, {})
        return {**entry, KEY: self._masters[param]} if param in self._masters else entry

    def keep_only(self, is_kept: Callable[[torch.Tensor], bool]) -> None:
        self._masters.keep_only(is_kept)

    def add_entries(self, entries: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        for param, entry in entries.items():
            if KEY in entry:
                self._masters.put(param, entry.pop(KEY))
            self._masters.optimizer.state[param] = entry

    def detach(self) -> None:
        """Masters stay when ranks no longer step together."""


def _packed(grad: torch.Tensor, master: torch.Tensor, factor: Factor) -> torch.Tensor:
    """Return ``grad`` times ``factor`` in the dtype and memory order of ``master``, a DTensor if that is one."""
    if is_dtensor(master):
        return dtensor_around(_packed(local_of(matched(grad, master)), local_of(master), factor), master)
    wide = torch.empty_like(master)
    kernels.pack([laid_out_like(grad, master)], laid_out_like(wide, master), factor)
    return wide
