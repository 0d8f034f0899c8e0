"""Detection of wrappers that average or own the same parameters.

DistributedDataParallel reads ``.grad`` in hooks of its own and writes to it when backward ends; with
pycomm on the same parameters both work on the same memory, and the result is neither's average. The
wrapper may be made before ``attach`` or after it, and be inside the given model or around it. So it is
looked for among all living modules when ``attach`` is called, whenever a module is registered in a
wrapper (the first thing that every wrapper does), and in every forward, where torch names the active one.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from pycomm.torch_internals import (
    active_ddp_module,
    children_of,
    is_flattened,
    parameters_of,
    parts_of,
    uses_outside_python,
)

_OF_TORCH = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "averages gradients itself",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "shards parameters and averages their gradients itself"
    ),
}
_WRAPPERS = {
    **_OF_TORCH,
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


def refuse_wrapped(names: Mapping[str, torch.Tensor], model: Any, hint: str = "") -> None:
    """Raise ValueError if a living wrapper has one of the parameters. May look at every object in the process.

    Args:
        model: what ``attach`` was given; only modules are searched.
        hint: advice for the message, in place of the general one.
    """
    if isinstance(model, torch.nn.Module):
        for module in model.modules():
            if wrapper_of(type(module)) is not None:
                outer = None if module is model else model
                raise ValueError(_message(module, next(iter(names), "?"), outer, hint))
    found = _first_conflict(names)
    if found is not None:
        gc.collect()  # it may be garbage
        found = None
        found = _first_conflict(names)
    if found is not None:
        module, name = found
        raise ValueError(_message(module, name, _parent_of(module), hint))


def is_wrapped(name: str, param: torch.Tensor) -> bool:
    """Return whether a living wrapper averages ``param``. May look at every object in the process."""
    return _first_conflict({name: param}) is not None


def refuse_active_wrapper(names_of: Callable[[], Mapping[str, torch.Tensor]]) -> None:
    """Raise ValueError if a forward of DistributedDataParallel is running that has one of these parameters."""
    active = active_ddp_module()
    if active is not None:
        name = _common(active, names_of())
        if name is not None:
            raise ValueError(_message(active, name, _parent_of(active), ""))


class Owner(Protocol):
    """Object that averages parameters: a Reducer."""

    module: torch.nn.Module | None

    def knows(self, param: torch.Tensor) -> bool: ...
    def named_parameters(self) -> Mapping[str, torch.Tensor]: ...


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_watch: list[Any] = []
"""The handle of the hook on module registration, while there are owners."""


def watch_constructions(owner: Owner) -> None:
    """Make the constructors of wrappers raise ValueError from now on if they get parameters of ``owner``."""
    _owners.add(owner)
    if not _watch:
        _watch.append(register_module_module_registration_hook(_on_registration))


def unwatch_constructions(owner: Owner) -> None:
    _owners.discard(owner)
    if not _owners:
        while _watch:
            _watch.pop().remove()


def _on_registration(parent: torch.nn.Module, _name: str, child: torch.nn.Module | None) -> None:
    if child is None or wrapper_of(type(parent)) is None or _conflict(child) is None:
        return
    gc.collect()  # the owner may be garbage
    name = _conflict(child)
    if name is not None:
        raise ValueError(_message(parent, name, None, ""))


def _conflict(child: torch.nn.Module) -> str | None:
    """Return the name of a parameter that a Reducer averages and that ``child`` is about to hand to a wrapper."""
    params = list(parameters_of(child))
    for owner in _owners:
        if any(owner.knows(param) for param in params):
            return _common(child, owner.named_parameters()) or "?"
        there = owner.module
        if there is not None and (any(m is child for m in parts_of(there)) or any(m is there for m in parts_of(child))):
            # FSDP has already replaced its parameters.
            return next(iter(owner.named_parameters()), "?")
    return None


def _living_wrappers(params: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """Return the wrappers that may average ``params``: all that live, unless it is certain that there are none."""
    classes = {cls: name for cls in _derived_from(torch.nn.Module) if (name := wrapper_of(cls)) is not None}
    # Torch's own wrappers leave marks, and these are nearly always absent: a Reducer in C++ owns what it averages.
    if _OF_TORCH.keys() >= set(classes.values()) and not any(
        uses_outside_python(param) > 1 or is_flattened(param) for param in params
    ):
        return []
    # Every object refers to its class. This search in C takes less than half the time of a loop over all objects.
    return [each for each in gc.get_referrers(*classes) if type(each) in classes]


def _derived_from(cls: type) -> set[type]:
    found: set[type] = set()
    left: list[type] = [cls]
    while left:
        below: list[type] = type.__subclasses__(left.pop())
        left += (each for each in below if each not in found)
        found.update(below)
    return found


def _first_conflict(names: Mapping[str, torch.Tensor]) -> tuple[torch.nn.Module, str] | None:
    for wrapper in _living_wrappers(names.values()):
        name = _common(wrapper, names)
        if name is not None:
            return wrapper, name
    return None


def _common(module: torch.nn.Module, names: Mapping[str, torch.Tensor]) -> str | None:
    """Return the first of ``names`` whose parameter belongs to ``module``, or ``None``."""
    ids = {id(p) for p in parameters_of(module)}
    return next((name for name, p in names.items() if id(p) in ids), None)


def _parent_of(wrapper: torch.nn.Module) -> torch.nn.Module | None:
    """Return a module that has ``wrapper`` as its child (OptimizedModule, _FabricModule and the like), or ``None``."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.nn.Module):
            module: torch.nn.Module = candidate
            if any(child is wrapper for child in children_of(module).values()):
                return module
    return None


def _message(wrapper: torch.nn.Module, name: str, outer: torch.nn.Module | None, hint: str) -> str:
    kind = wrapper_of(type(wrapper))
    assert kind is not None
    inside = "" if outer is None else f" (inside {type(outer).__name__})"
    short = kind.rsplit(".", 1)[1]
    advice = hint or f"train the module without {short}, or {_INSTEAD.get(short, 'leave pycomm.attach out')}"
    if not hint and "accelerate" in sys.modules:
        advice += "; with Accelerate, pycomm.integrations.accelerate.attach does what suits the model"
    if not hint and any(name.split(".")[0] in ("lightning", "lightning_fabric") for name in sys.modules):
        advice += "; with Lightning or Fabric, take a strategy of pycomm.integrations.lightning"
    return (
        f"parameter {name!r} belongs to a {short}{inside}, which {_WRAPPERS[kind]}: with pycomm on the same parameters "
        f"gradients would be wrong. {advice[0].upper()}{advice[1:]}"
    )
