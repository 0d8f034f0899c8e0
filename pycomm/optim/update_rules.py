"""Update rules: the steps of each supported optimizer in terms of kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch

from pycomm import kernels
from pycomm.layout import laid_out_like, require_dense

Group = dict[str, Any]


class Scratches(dict[str, kernels.Scratch]):
    """Scratch memory by name, made on first access."""

    def __missing__(self, name: str) -> kernels.Scratch:
        self[name] = kernels.Scratch()
        return self[name]


@dataclass(frozen=True)
class Target:
    """Parameter in a step.

    Attributes:
        weight: tensor to update, float32 or float64: the parameter, or its master.
        grad: its gradient, of any floating-point dtype.
        states: the optimizer's state of all parameters.
        param: the parameter, which is the key of its entry in ``states``.
        copy: the half-precision parameter that is overwritten with ``weight``, if that is a master.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    states: MutableMapping[Any, dict[str, Any]]
    param: torch.Tensor
    copy: torch.Tensor | None = None

    @cached_property
    def state(self) -> dict[str, Any]:
        """Entry of the parameter, made if there is none yet."""
        return self.states[self.param]

    def has(self, key: str) -> bool:
        """Return whether the parameter's entry has ``key``; does not make an entry."""
        return self.states.get(self.param, {}).get(key) is not None

    def buffer(self, key: str) -> torch.Tensor:
        """Return ``state[key]`` in the memory order of ``weight``, as zeros if it does not exist yet; it is stored."""
        old: torch.Tensor | None = self.state.get(key)
        weight = self.weight
        if old is None:
            new = torch.zeros_like(weight, memory_format=torch.preserve_format)
        elif old.shape != weight.shape:
            raise ValueError(f"{key!r} has shape {list(old.shape)}, its parameter {list(weight.shape)}")
        elif old.stride() == weight.stride() and old.dtype == weight.dtype:
            return old
        else:
            new = torch.empty_like(weight, memory_format=torch.preserve_format).copy_(old)
        self.state[key] = new
        return new


@dataclass(frozen=True)
class Batch:
    """Targets that are stepped by the same kernel call."""

    targets: Sequence[Target]
    scale: float | torch.Tensor
    """Factor by which gradients are multiplied."""
    scratches: Scratches
    label: str
    """Name of the batch, unique within its optimizer."""

    def scratch(self, name: str) -> kernels.Scratch:
        """Return the scratch memory that the kernel ``name`` keeps from step to step for this batch."""
        return self.scratches[f"{self.label} {name}"]

    def weights(self) -> list[torch.Tensor]:
        """Return the weights, flat in memory order."""
        return [_flat(t.weight) for t in self.targets]

    def grads(self) -> list[torch.Tensor]:
        """Return the gradients in the memory order of the weights."""
        return [
            t.grad if t.grad.is_contiguous() and t.weight.is_contiguous() else laid_out_like(t.grad, t.weight)
            for t in self.targets
        ]

    def buffers(self, key: str) -> list[torch.Tensor]:
        """Return the state tensors ``key``, made if they do not exist yet."""
        return [_flat(t.buffer(key)) for t in self.targets]

    def copies(self) -> list[torch.Tensor] | None:
        """Return the half-precision parameters if the weights are masters, else ``None``."""
        copies = [_flat(t.copy) for t in self.targets if t.copy is not None]
        assert len(copies) in (0, len(self.targets)), "masters and plain parameters are stepped apart"
        return copies or None

    def common(self, name: str) -> dict[str, Any]:
        """Return the arguments that every step kernel takes; ``name`` selects its scratch memory."""
        return {"scale": self.scale, "copies": self.copies(), "scratch": self.scratch(name)}

    def split(self, key: Callable[[Target], Any]) -> Iterable[tuple[Any, Batch]]:
        """Split the targets by ``key(target)``; yield values and batches in order of appearance."""
        return self.split_by(map(key, self.targets))

    def split_by(self, keys: Iterable[Any]) -> Iterable[tuple[Any, Batch]]:
        """Split the targets by ``keys``, one for each target; yield keys and batches in order of appearance."""
        parts: dict[Any, list[Target]] = {}
        for key, target in zip(keys, self.targets, strict=True):
            parts.setdefault(key, []).append(target)
        if len(parts) <= 1:
            yield from ((value, self) for value in parts)
            return
        # Labelled by number, not by value: a value such as the step count would need new scratch memory every time.
        for number, (value, targets) in enumerate(parts.items()):
            yield value, Batch(targets, self.scale, self.scratches, f"{self.label} {number}")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.is_contiguous() else laid_out_like(tensor, tensor)


def _sign(group: Group) -> float:
    return -1.0 if group.get("maximize") else 1.0


def next_step(target: Target) -> int:
    """Increment the target's step count, stored as torch does in a float32 tensor on the CPU, and return it."""
    return next_steps([target])[0]


def next_steps(targets: Sequence[Target]) -> list[int]:
    """Increment the step counts of many targets together, which is faster, and return them."""
    steps = []
    for target in targets:
        step = target.state.get("step")
        if not isinstance(step, torch.Tensor) or not step.is_cpu:
            step = torch.tensor(0.0 if step is None else float(step), dtype=torch.float32)
            target.state["step"] = step
        steps.append(step)
    torch._foreach_add_(steps, 1.0)
    return [int(step) for step in torch.stack(steps).tolist()]


def sgd(group: Group, batch: Batch) -> None:
    """Step as torch.optim.SGD does."""
    momentum = float(group["momentum"])
    # As in torch, the first momentum is the gradient itself, without dampening.
    for old, part in batch.split(lambda t: t.has("momentum_buffer")):
        kernels.momentum_step(
            part.weights(),
            part.grads(),
            part.buffers("momentum_buffer") if momentum else None,
            lr=float(group["lr"]),
            momentum=momentum,
            dampening=float(group["dampening"]) if old and momentum else 0.0,
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            **part.common("sgd"),
        )


def adam(group: Group, batch: Batch, decoupled: bool = False) -> None:
    """Step as torch.optim.Adam does, or AdamW if ``decoupled``."""
    for step, part in list(batch.split_by(next_steps(batch.targets))):
        kernels.adam_step(
            part.weights(),
            part.grads(),
            part.buffers("exp_avg"),
            part.buffers("exp_avg_sq"),
            part.buffers("max_exp_avg_sq") if group["amsgrad"] else None,
            lr=float(group["lr"]),
            moments=_moments(group, step),
            weight_decay=float(group["weight_decay"]),
            decoupled=decoupled or bool(group.get("decoupled_weight_decay")),
            **part.common("adam"),
        )


def adamw(group: Group, batch: Batch) -> None:
    """Step as torch.optim.AdamW does."""
    adam(group, batch, decoupled=True)


def _moments(group: Group, step: int) -> kernels.Moments:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return kernels.Moments((beta1, beta2), float(group["eps"]), step, bool(group.get("bias_correction", True)))


def rmsprop(group: Group, batch: Batch) -> None:
    """Step as torch.optim.RMSprop does."""
    next_steps(batch.targets)
    kernels.rmsprop_step(
        batch.weights(),
        batch.grads(),
        batch.buffers("square_avg"),
        batch.buffers("momentum_buffer") if group["momentum"] else None,
        batch.buffers("grad_avg") if group["centered"] else None,
        lr=float(group["lr"]),
        alpha=float(group["alpha"]),
        eps=float(group["eps"]),
        momentum=float(group["momentum"]),
        weight_decay=float(group["weight_decay"]),
        **batch.common("rmsprop"),
    )


def adapts(group: Group, weight: torch.Tensor) -> bool:
    """Return whether LARS and LAMB scale the step of ``weight`` by its norm, and decay it."""
    return bool(group["exclude"] == "none" or (group["exclude"] == "one_dimensional" and weight.dim() > 1))


def lars(group: Group, batch: Batch) -> None:
    """Step as :class:`pycomm.LARS` does."""
    for adapted, part in batch.split(lambda t: adapts(group, t.weight)):
        decay = float(group["weight_decay"]) if adapted else 0.0
        weights, grads = part.weights(), part.grads()
        rates = torch.full((len(weights),), float(group["lr"]), dtype=torch.float64, device=weights[0].device)
        if adapted:
            rates *= lars_ratios(weights, grads, part, float(group["trust_coefficient"]), decay)
        kernels.momentum_step(
            weights,
            grads,
            part.buffers("momentum_buffer") if group["momentum"] else None,
            lr=1.0,  # the rate is inside the momentum, which so stays correct when the learning rate changes
            momentum=float(group["momentum"]),
            weight_decay=decay,
            nesterov=bool(group["nesterov"]),
            rates=rates,
            **part.common("lars"),
        )


def lars_ratios(
    weights: list[torch.Tensor], grads: list[torch.Tensor], batch: Batch, trust_coefficient: float, decay: float
) -> torch.Tensor:
    """Return the trust coefficient times ||w|| / (||g|| + decay ||w||) of each weight, or 1 if a norm is 0; float64."""
    squares = kernels.squared_norms([*weights, *grads], scratch=batch.scratch("norms"))
    norms = squares.sqrt()
    w, g = norms[: len(weights)], norms[len(weights) :] * abs(batch.scale)
    return torch.where((w > 0) & (g != 0), trust_coefficient * w / (g + decay * w), 1.0)


def lamb(group: Group, batch: Batch) -> None:
    """Step as :class:`pycomm.LAMB` does."""
    for step, same_step in list(batch.split_by(next_steps(batch.targets))):
        moments = _moments(group, step)
        for adapted, part in same_step.split(lambda t: adapts(group, t.weight)):
            decay = float(group["weight_decay"]) if adapted else 0.0
            weights, states = part.weights(), (part.buffers("exp_avg"), part.buffers("exp_avg_sq"))
            common = part.common("lamb")
            copies = common.pop("copies")
            squares = kernels.lamb_moments(
                weights, part.grads(), *states, moments=moments, weight_decay=decay, **common
            )
            rates = torch.full((len(weights),), float(group["lr"]), dtype=torch.float64, device=weights[0].device)
            if adapted:
                w, r = squares.sqrt().unbind(1)
                rates *= torch.where((w > 0) & (r != 0), w / r, 1.0)
            kernels.lamb_apply(
                weights,
                *states,
                rates,
                moments=moments,
                weight_decay=decay,
                copies=copies,
                scratch=part.scratch("lamb_apply"),
            )


def flip(group: Group, scale: float | torch.Tensor) -> float | torch.Tensor:
    """Return ``scale``, negated if the group maximizes."""
    return scale * _sign(group)


Rule = Callable[[Group, Batch], None]


_scratches: WeakKeyDictionary[torch.optim.Optimizer, Scratches] = WeakKeyDictionary()


def step_by_rule(
    optimizer: torch.optim.Optimizer,
    rule: Rule,
    factor: float | torch.Tensor = 1.0,
    masters: Mapping[torch.Tensor, torch.Tensor] | None = None,
    grads: Mapping[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Take one step of every parameter that has a gradient.

    Args:
        optimizer: owner of the parameters, hyperparameters and state.
        rule: rule of the optimizer's class.
        factor: number by which gradients are multiplied first.
        masters: masters of half-precision parameters, which are updated in their place and cast back.
        grads: gradients to use instead of ``.grad``, by parameter.

    Raises:
        ValueError: a gradient is sparse, or a parameter has gaps or overlaps in memory.
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
    """Return the group's parameters that have a gradient, sorted into lists that one kernel call can take."""
    targets: dict[Any, list[Target]] = defaultdict(list)
    for p in group["params"]:
        grad = grads.get(p, p.grad)
        if grad is None:
            continue
        if grad.layout != torch.strided:
            raise ValueError(f"a gradient of shape {list(p.shape)} is sparse; fused steps need dense ones")
        require_dense(p)
        weight = masters.get(p, p)
        target = Target(weight, grad, optimizer.state, p, p.detach() if p in masters else None)
        targets[weight.dtype, p.device, p in masters].append(target)
    return targets
