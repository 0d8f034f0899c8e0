"""Which parameters there are, and what they are called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

_GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def names_of(
    optimizer: torch.optim.Optimizer,
    model_or_named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """The optimizer's parameters by name, in the order of the model.

    Raises:
        TypeError, ValueError: no names, a name twice, a parameter of the optimizer without a name.
    """
    if isinstance(model_or_named_parameters, DistributedDataParallel):
        raise ValueError(
            "model_or_named_parameters is wrapped in DistributedDataParallel, which averages gradients "
            "itself: pass the module that it wraps, and train that one"
        )
    if isinstance(model_or_named_parameters, torch.nn.Module):
        pairs: list[tuple[str, torch.Tensor]] = list(model_or_named_parameters.named_parameters())
    else:
        pairs = [_pair(item) for item in model_or_named_parameters]
    wanted = {id(p) for p in optimizer_parameters(optimizer)}
    names: dict[str, torch.Tensor] = {}
    for name, param in pairs:
        if name in names and names[name] is not param:
            raise ValueError(f"two parameters are called {name!r}")
        if id(param) in wanted:
            names[name] = param
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
