"""Parameters in a step, with their gradients and states."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pycomm.collectives.layout import laid_out_like
from pycomm.optim.partition import Partition, Span
from pycomm.optim.shards import matched
from pycomm.torch_internals import dtensor_around, is_dtensor, local_of

Group = dict[str, Any]


@dataclass(frozen=True)
class StepTarget:
    """Parameter in a step.

    Attributes:
        weight: tensor to update, float32 or float64: the parameter, or its master; of a DTensor, this rank's part.
        grad: its gradient, of any floating-point dtype; likewise.
        states: the optimizer's state of all parameters.
        param: the parameter, which is the key of its entry in ``states``.
        copy: the half-precision parameter that is overwritten with ``weight``, if that is a master.
        partition: the ranks that step it together, each its own elements; ``None``: this one steps it alone.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    states: MutableMapping[Any, dict[str, Any]]
    param: torch.Tensor
    copy: torch.Tensor | None = None
    partition: Partition | None = None

    @cached_property
    def span(self) -> Span:
        """Elements that this rank steps."""
        return Span(0, self.weight.numel()) if self.partition is None else self.partition.span_of(self.param)

    @cached_property
    def state(self) -> dict[str, Any]:
        """Entry of the parameter, made if there is none yet."""
        return self.states[self.param]

    def written(self) -> list[torch.Tensor]:
        """Return the tensors that a step writes to, with the DTensor around them."""
        around = [self.param] if is_dtensor(self.param) else []
        return [self.weight, *([] if self.copy is None else [self.copy]), *around]

    def has(self, key: str) -> bool:
        """Return whether the parameter's entry has ``key``; does not make an entry."""
        return self.states.get(self.param, {}).get(key) is not None

    def buffer(self, key: str, initial: float = 0.0) -> torch.Tensor:
        """Return ``state[key]`` in the memory order of ``weight``; store a tensor of ``initial`` if there is none."""
        old = self._old(key)
        weight = self.weight
        if self.partition is not None:
            return self._at_home(self.partition, key, old, initial)
        if old is None:
            new = torch.full_like(weight, initial, memory_format=torch.preserve_format)
        elif old.shape != weight.shape:
            raise ValueError(f"{key!r} has shape {list(old.shape)}, its parameter {list(weight.shape)}")
        elif old.stride() == weight.stride() and old.dtype == weight.dtype:
            return old
        else:
            new = torch.empty_like(weight, memory_format=torch.preserve_format).copy_(old)
        self.state[key] = dtensor_around(new, self.param) if is_dtensor(self.param) else new
        return new

    def _at_home(self, partition: Partition, key: str, old: torch.Tensor | None, initial: float) -> torch.Tensor:
        """Return ``state[key]`` in memory that the ranks share, after moving this rank's elements there."""
        weight = self.weight
        if old is not None and old.shape != weight.shape:
            raise ValueError(f"{key!r} has shape {list(old.shape)}, its parameter {list(weight.shape)}")
        home = partition.home(self.param, key, weight.dtype)
        if old is None:
            self.span.of(home).fill_(initial)
        elif old.data_ptr() != home.data_ptr() or old.dtype != home.dtype:
            self.span.of(home).copy_(laid_out_like(old, home).view(-1)[slice(*self.span)])
        else:
            return old
        self.state[key] = home
        return home

    def _old(self, key: str) -> torch.Tensor | None:
        """Return ``state[key]``, or this rank's part of it if it is a DTensor."""
        old: torch.Tensor | None = self.state.get(key)
        if old is None or not is_dtensor(self.param):
            return old
        if not is_dtensor(old):
            raise ValueError(f"{key!r} is an ordinary tensor, wanted a DTensor as its parameter is")
        return local_of(matched(old, self.param))


def weights_of(targets: Sequence[StepTarget]) -> list[torch.Tensor]:
    """Return the weights, flat in memory order. Here and below, arrays hold the elements that this rank steps."""
    return [_stepped(t, t.weight) for t in targets]


def grads_of(targets: Sequence[StepTarget]) -> list[torch.Tensor]:
    """Return the gradients in the memory order of the weights."""
    return [
        laid_out_like(t.grad, t.weight)
        if t.partition is None
        else laid_out_like(t.grad, t.weight).view(-1)[slice(*t.span)]
        for t in targets
    ]


def buffers_of(targets: Sequence[StepTarget], key: str, initial: float = 0.0) -> list[torch.Tensor]:
    """Return the state tensors ``key``, made of ``initial`` if they do not exist yet."""
    return [_stepped(t, t.buffer(key, initial)) for t in targets]


def copies_of(targets: Sequence[StepTarget]) -> list[torch.Tensor] | None:
    """Return the half-precision parameters if the weights are masters, else ``None``."""
    copies = [_stepped(t, t.copy) for t in targets if t.copy is not None]
    assert len(copies) in (0, len(targets)), "masters and plain parameters are stepped apart"
    return copies or None


def mirrors_of(targets: Sequence[StepTarget]) -> list[list[torch.Tensor]]:
    """Return each other rank's memory to which the new weights are written as well."""
    partition = targets[0].partition
    if partition is None:
        return []
    return [list(of) for of in zip(*(partition.mirrors_of(t.param) for t in targets), strict=True)]


def counts_of(targets: Sequence[StepTarget]) -> list[torch.Tensor]:
    """Return the step counts where kernels can increment them, as torch's fused optimizers have them; 0 if new."""
    for target in targets:
        step, device = target.state.get("step"), target.weight.device
        if not isinstance(step, torch.Tensor):
            step = torch.tensor(0.0 if step is None else float(step))
        if step.dtype != torch.float32 or step.device != device:
            step = step.to(device, torch.float32)
        target.state["step"] = step
    return [target.state["step"] for target in targets]


def next_steps(targets: Sequence[StepTarget]) -> list[int]:
    """Increment the step counts, stored as torch does in float32 tensors on the CPU, together; return them."""
    if not targets:
        return []
    steps = []
    for target in targets:
        step = target.state.get("step")
        if not isinstance(step, torch.Tensor) or not step.is_cpu:
            step = torch.tensor(0.0 if step is None else float(step), dtype=torch.float32)
            target.state["step"] = step
        steps.append(step)
    torch._foreach_add_(steps, 1.0)
    return [int(step) for step in torch.stack(steps).tolist()]


def _stepped(target: StepTarget, tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` that this rank steps, flat; it has the layout of the target's weight."""
    if target.partition is not None:
        return target.span.of(tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.is_contiguous() else laid_out_like(tensor, tensor)
