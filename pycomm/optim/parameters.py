"""Which parameters there are, and what they are called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

_TRAINERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose optimizers are proxies, even where they show another state."""

_GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that steps, where ``optimizer`` is a trainer's proxy for it (Accelerate's, Lightning's, Fabric's).

    An optimizer that works with another one inside, and has state of its own, is none.
    """
    while True:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) or inner is optimizer:
            return optimizer
        same = optimizer.state is inner.state and optimizer.param_groups is inner.param_groups
        if not same and type(optimizer).__module__.split(".")[0] not in _TRAINERS:
            return optimizer
        optimizer = inner


def names_of(
    optimizer: torch.optim.Optimizer,
    model_or_named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
    all_parameters: bool = False,
) -> dict[str, torch.Tensor]:
    """The optimizer's parameters by name, in the order of the model; or all that have a name.

    Raises:
        TypeError, ValueError: no names, a name twice, a parameter of the optimizer without a name.
    """
    if isinstance(model_or_named_parameters, torch.nn.Module):
        pairs: list[tuple[str, torch.Tensor]] = list(model_or_named_parameters.named_parameters())
    else:
        pairs = [_pair(item) for item in model_or_named_parameters]
    wanted = {id(p) for p in optimizer_parameters(optimizer)}
    names: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name, param in pairs:
        if name in names and names[name] is not param:
            raise ValueError(f"two parameters are called {name!r}")
        if id(param) in wanted or (all_parameters and id(param) not in taken):
            names[name] = param
            taken.add(id(param))
            wanted.discard(id(param))
    if wanted:
        raise ValueError(
            f"{len(wanted)} parameter(s) of the optimizer are not among model_or_named_parameters, "
            f"the first of shape {_shape_of(optimizer, wanted)}: was it given another model?"
        )
    return names


def _pair(item: object) -> tuple[str, torch.Tensor]:
    if isinstance(item, tuple) and len(item) == 2:
        name, param = item
        if isinstance(name, str) and isinstance(param, torch.Tensor):
            return name, param
    raise TypeError(
        f"model_or_named_parameters yields {type(item).__name__}, wanted a torch.nn.Module or (name, tensor) pairs "
        "as from named_parameters()"
    )


def _shape_of(optimizer: torch.optim.Optimizer, wanted: set[int]) -> list[int]:
    return next(list(p.shape) for p in optimizer_parameters(optimizer) if id(p) in wanted)


def check_parameters(names: dict[str, torch.Tensor], device: torch.device | None = None) -> None:
    """TypeError or ValueError for a parameter whose gradient cannot travel; all are on one ``device``."""
    for name, param in names.items():
        _check_memory(name, param)
        if param.dtype not in _GRADIENT_DTYPES:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in _GRADIENT_DTYPES)
            raise TypeError(f"parameter {name!r} has dtype {param.dtype}, wanted one of {wanted}")
        if param.device.type not in ("cpu", "cuda"):
            raise ValueError(f"parameter {name!r} is on device {param.device}, wanted CPU or CUDA memory")
        device = device or param.device
        if param.device != device:
            raise ValueError(
                f"parameter {name!r} is on device {param.device}, others on {device}; wanted all parameters of a "
                "process on one device"
            )


def _check_memory(name: str, param: torch.Tensor) -> None:
    """TypeError for a parameter that is no piece of this process's memory."""
    kind = type(param).__name__
    if getattr(param, "_is_flat_param", False) or kind == "FlatParameter":
        raise TypeError(
            f"parameter {name!r} is a flat parameter of FullyShardedDataParallel, of which each rank has another "
            "shard: FSDP averages gradients itself; leave pycomm.attach out"
        )
    if hasattr(param, "__tensor_flatten__") or hasattr(param, "device_mesh"):
        raise TypeError(
            f"parameter {name!r} is a {kind}, sharded or wrapped around other tensors (fully_shard, tensor "
            "parallelism): wanted ordinary parameters; FSDP2 averages gradients itself, leave pycomm.attach out"
        )
    if param.device.type == "meta" or (param.numel() > 0 and _has_no_memory(param)):
        raise TypeError(
            f"parameter {name!r}, a {kind} on device {param.device}, has no memory: wanted parameters that are "
            "materialised (module.to_empty(device=...), then initialised) and not freed"
        )
    if hasattr(param, "_in_backward_optimizers"):
        raise ValueError(
            f"parameter {name!r} is stepped in backward (_apply_optimizer_in_backward), before its gradient could be "
            "averaged: use an ordinary optimizer.step()"
        )


def _has_no_memory(param: torch.Tensor) -> bool:
    try:
        return param.data_ptr() == 0
    except RuntimeError:  # a tensor that only pretends to have any
        return True
