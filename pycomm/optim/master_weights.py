"""Master weights: half-precision parameters whose float32 originals are what an optimizer updates.

A step moves a weight by a thousandth of itself and less. float16 keeps 11 bits and bfloat16 8, so such
a step is rounded away (Micikevicius et al., "Mixed Precision Training", 2018, section 3.1). The model
keeps its half-precision parameters; the optimizer works on float32 copies, and casts them back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pycomm import kernels
from pycomm.layout import laid_out_like, require_dense
from pycomm.optim.fused import RULES, KernelStep, rule_of
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.step_override import HALF, Factor, evaluate, own_step
from pycomm.optim.update_rules import step_by_rule
from pycomm.torch_internals import leave_scale_to_step, undo_leave_scale_to_step, version_of

KEY = "master_weight"
"""In the state of a parameter, as ``state_dict()`` has it."""


def master_weights(optimizer: torch.optim.Optimizer) -> MasterWeights:
    """Give the float16 and bfloat16 parameters of any ``optimizer`` float32 masters.

    The optimizer stays the same object, with the model's own parameters in its groups:
    ``zero_grad``, schedulers, hooks and ``attach`` work as before. Its state is float32. ``step()``
    updates the masters and casts them back: in one kernel for torch's SGD, Adam, AdamW and RMSprop and
    for LARS and LAMB; for all others their own ``step`` runs on the masters. ``state_dict()`` has the
    masters in each parameter's state, under "master_weight", and ``load_state_dict`` keeps everything
    float32. A parameter that something else has written to, ``model.load_state_dict`` say, becomes its
    master's new value (writes through ``param.data`` in place go unseen, as autograd has it too).

    Call it before ``attach``, after the model was cast (``model.half()``).

    Returns:
        The handle: ``parameters()`` for clipping code of your own, ``detach()``.

    Raises:
        TypeError: not an optimizer. RuntimeError: its ``step`` has been replaced already.
        ValueError: a parameter has gaps in memory.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}, wanted a torch.optim.Optimizer")
    return MasterWeights(optimizer)


class MasterWeights(KernelStep):
    """Handle of an optimizer with float32 masters, made by :func:`master_weights`."""

    has_masters = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        self._stamps: dict[torch.Tensor, tuple[int, int]] = {}
        self._unscaled: dict[torch.Tensor, _Unscaled] = {}
        self._rule = rule_of(optimizer) if type(optimizer) in RULES else None
        for param in optimizer_parameters(optimizer):
            if param.dtype in HALF:
                require_dense(param)
        super().__init__(optimizer)
        self._add_new(optimizer_parameters(optimizer))
        # GradScaler.unscale_() refuses float16; with this mark its step() leaves the factor to ours.
        self._took_scale = leave_scale_to_step(optimizer)
        vars(optimizer)["load_state_dict"] = self._load_state_dict
        self._hook = optimizer.register_state_dict_post_hook(self._add_masters)

    def parameters(self) -> list[torch.Tensor]:
        """What steps update, in the order of the groups: masters, or the parameters that need none.

        After ``LossScaler.unscale_`` masters have their true gradients in ``.grad``.
        """
        return [self.master_of(p) for p in optimizer_parameters(self.optimizer)]

    def master_of(self, param: torch.Tensor) -> torch.Tensor:
        """``param``'s master; ``param`` itself if it is no half-precision one."""
        self._add_new([param])
        return self._masters.get(param, param)

    def masters(self) -> list[torch.Tensor]:
        """Those of half-precision parameters, with what was written to the parameters since."""
        self._refresh()
        return list(self._masters.values())

    def restore(self) -> None:
        """Cast all masters back, after they were written to."""
        with torch.no_grad():
            for param, master in self._masters.items():
                param.copy_(master)
                self._stamps[param] = _stamp(param)

    def detach(self) -> None:
        """Give the optimizer its own ``step`` back, and its state the dtypes which that wants. Idempotent."""
        attributes = vars(self.optimizer)
        if attributes.get("load_state_dict") is not None:
            del attributes["load_state_dict"]
            undo_leave_scale_to_step(self.optimizer, self._took_scale)
            self._hook.remove()
            for param in self._masters:
                self._cast_state(param, param.dtype)
        super().detach()

    # Steps.

    def run(self, closure: Callable[[], Any] | None) -> Any:
        if self._rule is not None:
            return super().run(closure)
        factor, found = self.take_factor()
        if found:
            self.forget()
            return evaluate(closure)
        # An optimizer may call its closure several times: each time on the model's own dtype, with gradients anew.
        self._refresh()
        with self._wide(factor) as widen:

            def narrow_closure() -> Any:
                assert closure is not None
                widen(False)
                try:
                    return evaluate(closure)
                finally:
                    self._refresh()  # a closure may write to parameters
                    widen(True)

            return own_step(self.optimizer, None if closure is None else narrow_closure)

    def update(self, factor: Factor) -> None:
        assert self._rule is not None
        self._refresh()
        step_by_rule(self.optimizer, self._rule, factor, self._masters, self._unscaled_grads())
        self._after_step()

    def unscale(self, factor: Factor) -> None:
        """Leave gradients times ``factor`` in ``.grad`` of what :meth:`parameters` gives; float32 for masters."""
        self._refresh()
        for param in optimizer_parameters(self.optimizer):
            if param.grad is None:
                continue
            if param in self._masters:
                master = self._masters[param]
                wide = torch.empty_like(master)
                kernels.pack([laid_out_like(param.grad, master)], laid_out_like(wide, master), factor)
                master.grad = wide
                self._unscaled[param] = _Unscaled(wide, param.grad, version_of(param.grad))
            else:
                param.grad.mul_(factor)

    def unscaled(self) -> list[torch.Tensor] | None:
        grads = self._unscaled_grads()
        if not grads:
            return None
        return [grads.get(p, p.grad) for p in optimizer_parameters(self.optimizer) if p.grad is not None]

    def _unscaled_grads(self) -> dict[torch.Tensor, torch.Tensor]:
        """By parameter, of those whose ``.grad`` is still the one that was unscaled: no step may have used it up."""
        current = {param: unscaled for param, unscaled in self._unscaled.items() if unscaled.of is param.grad}
        if any(version_of(unscaled.of) != unscaled.version for unscaled in current.values()):
            raise RuntimeError(
                "the gradient of a half-precision parameter was written to after unscale_(): what counts is that of "
                "its master, in MasterWeights.parameters()"
            )
        return {param: unscaled.grad for param, unscaled in current.items()}

    def forget(self) -> None:
        super().forget()
        self._unscaled.clear()
        for master in self._masters.values():
            master.grad = None

    def _after_step(self) -> None:
        self.forget()
        for param in self._masters:
            self._stamps[param] = _stamp(param)

    @contextlib.contextmanager
    def _wide(self, factor: Factor = 1.0) -> Iterator[Callable[[bool], None]]:
        """Parameters are their masters, and gradients float32 and times ``factor``, until this ends; or until told."""
        narrow: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]] = {}
        unscaled = self._unscaled_grads()

        def widen(yes: bool) -> None:
            for param in optimizer_parameters(self.optimizer):
                if yes and param not in narrow:
                    narrow[param] = param.data, param.grad
                    grad = unscaled.get(param, param.grad)
                    _become(param, self._masters.get(param, param.data), self._wide_grad(param, grad, factor))
                elif not yes and param in narrow:
                    data, grad = narrow.pop(param)
                    if param in self._masters:
                        data.copy_(self._masters[param])
                    _become(param, data, grad)
                    if param in self._masters:
                        self._stamps[param] = _stamp(param)

        try:
            widen(True)
            yield widen
        finally:
            widen(False)
            self._after_step()

    def _wide_grad(self, param: torch.Tensor, grad: torch.Tensor | None, factor: Factor) -> torch.Tensor | None:
        if grad is None or (param not in self._masters and isinstance(factor, float) and factor == 1.0):
            return grad
        dtype = self._masters[param].dtype if param in self._masters else param.dtype
        return grad.to(dtype) * factor

    # Masters.

    def _add_new(self, params: Iterable[torch.Tensor]) -> None:
        for param in params:
            if param in self._masters or param.dtype not in HALF:
                continue
            require_dense(param)
            self._masters[param] = param.detach().float()
            self._stamps[param] = _stamp(param)
            self._cast_state(param, torch.float32)  # of an optimizer that has stepped before, or makes it at once

    def _refresh(self) -> None:
        """Take in new parameters, and values that something else has given to known ones."""
        self._add_new(optimizer_parameters(self.optimizer))
        for param, master in self._masters.items():
            if _stamp(param) == self._stamps[param]:
                continue
            require_dense(param)
            if (master.shape, master.stride(), master.device) != (param.shape, param.stride(), param.device):
                # The model was moved, or its memory order changed: kernels want both alike.
                master.data = torch.empty_like(param, dtype=master.dtype).copy_(master)
            if not torch.equal(master.to(param.dtype), param.detach()):
                master.copy_(param.detach())
            self._stamps[param] = _stamp(param)

    # State.

    def _cast_state(self, param: torch.Tensor, dtype: torch.dtype) -> None:
        """All of ``param``'s that is in float32 or half precision, but counts of steps, as torch's loading has it."""
        entry = self.optimizer.state.get(param, {})
        for key, value in entry.items():
            if key != "step":
                entry[key] = _cast(value, dtype)

    def _add_masters(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        self._refresh()
        for index, param in enumerate(optimizer_parameters(optimizer)):
            if param in self._masters:
                state_dict["state"][index] = {**state_dict["state"].get(index, {}), KEY: self._masters[param]}

    def _load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """torch's, with parameters that look float32 to it, so that it casts nothing to half precision."""
        self._refresh()
        optimizer = self.optimizer
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError("state_dict is not of an optimizer: it has no 'state' and 'param_groups'")
        saved = dict(state_dict)
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        params = list(optimizer_parameters(optimizer))
        found: dict[torch.Tensor, torch.Tensor] = {}
        state = dict(saved["state"])
        for number, param in zip(numbers, params, strict=False):  # torch itself says what does not fit
            if param not in self._masters:
                continue
            entry = dict(state.get(number, {}))
            if KEY not in entry:
                raise ValueError(
                    f"the state of parameter {number} has no {KEY!r}: it was saved without master_weights; load it "
                    "before calling master_weights, then the masters are the model's parameters"
                )
            found[param] = entry.pop(KEY)
            if not isinstance(found[param], torch.Tensor):
                raise ValueError(f"the master weight of parameter {number} is a {type(found[param]).__name__}")
            if found[param].shape != param.shape:
                raise ValueError(
                    f"the master weight of parameter {number} has shape {list(found[param].shape)}, wanted "
                    f"{list(param.shape)}"
                )
            state.pop(number, None)
            if entry:
                state[number] = entry
        saved["state"] = state
        with self._wide():
            type(optimizer).load_state_dict(optimizer, saved)
        with torch.no_grad():
            for param, master in found.items():
                self._masters[param].copy_(master)
        self.restore()


@dataclass(frozen=True)
class _Unscaled:
    """A float32 gradient; ``of``: the one in half precision, which still is scaled, as it was at ``version``."""

    grad: torch.Tensor
    of: torch.Tensor
    version: int


def _stamp(param: torch.Tensor) -> tuple[int, int]:
    """Changes when ``param`` is written to, or lies elsewhere."""
    return version_of(param), param.data_ptr()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):  # LBFGS keeps its history in them
        return [_cast(one, dtype) for one in value]
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, *HALF):
        return value.to(dtype)
    return value


def _become(param: torch.Tensor, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    param.grad = None  # which must have the dtype of its parameter at all times
    param.data = data
    param.grad = grad
