"""Detection of wrappers that average or own the same parameters.

DistributedDataParallel reads ``.grad`` in hooks of its own and writes to it when backward ends; with pycomm on the same
parameters both work on the same memory, and the result is neither's average. A wrapper inside the module that
``attach`` is given is refused there. One around it, made before or later, shows in its first forward, where torch
names the active one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pycomm.torch_internals import active_ddp_module, is_flattened, parameters_of

_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "averages gradients itself",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "shards parameters and averages their gradients itself"
    ),
    "deepspeed.runtime.engine.DeepSpeedEngine": "averages gradients itself",
}
"""Descriptions of the wrappers by full class name, so that none of them has to be imported."""

_INSTEAD = {
    "DistributedDataParallel": "keep it and call pycomm.ddp.register(ddp_model, compression=...) in place of attach",
}
"""What to do in place of ``attach``, by the name of the wrapper."""


def wrapper_of(cls: type) -> str | None:
    """Return the full name of the known wrapper that ``cls`` is or derives from, or ``None``."""
    return next((name for base in cls.__mro__ if (name := f"{base.__module__}.{base.__qualname__}") in _WRAPPERS), None)


def refuse_wrapped(names: Mapping[str, torch.Tensor], model: Any) -> None:
    """Raise ValueError if a wrapper inside ``model``, or FullyShardedDataParallel anywhere, has one of the parameters.

    ``model``: what ``attach`` was given; only modules are searched.
    """
    if isinstance(model, torch.nn.Module):
        for module in model.modules():
            if (kind := wrapper_of(type(module))) is not None:
                raise ValueError(_message(kind, next(iter(names), "?"), None if module is model else model))
    flattened = next((name for name, param in names.items() if is_flattened(param)), None)
    if flattened is not None:
        raise ValueError(_message(list(_WRAPPERS)[1], flattened, None))


def refuse_active_wrapper(names_of: Callable[[], Mapping[str, torch.Tensor]]) -> None:
    """Raise ValueError if a forward of DistributedDataParallel is running that has one of these parameters."""
    active = active_ddp_module()
    kind = None if active is None else wrapper_of(type(active))
    if active is not None and kind is not None:
        ids = set(map(id, parameters_of(active)))
        name = next((name for name, param in names_of().items() if id(param) in ids), None)
        if name is not None:
            raise ValueError(_message(kind, name, None))


def _message(kind: str, name: str, outer: torch.nn.Module | None) -> str:
    inside = "" if outer is None else f" (inside {type(outer).__name__})"
    short = kind.rsplit(".", 1)[1]
    advice = f"train the module without {short}, or {_INSTEAD.get(short, 'leave pycomm.attach out')}"
    if "accelerate" in sys.modules:
        advice += "; with Accelerate, pycomm.integrations.accelerate.attach does what suits the model"
    if any(name.split(".")[0] in ("lightning", "lightning_fabric") for name in sys.modules):
        advice += "; with Lightning or Fabric, use a strategy of pycomm.integrations.lightning"
    return (
        f"parameter {name!r} belongs to a {short}{inside}, which {_WRAPPERS[kind]}: with pycomm on the same parameters "
        f"gradients would be wrong. {advice[0].upper()}{advice[1:]}"
    )
