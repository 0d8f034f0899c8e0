"""Finding out that something else averages, or owns, the same parameters.

DistributedDataParallel reads ``.grad`` in hooks of its own and writes to it when backward ends; with
pycomm on the same parameters both work on the same memory, and what comes out is neither's average.
It may be there before ``attach`` or come after it, be inside the model that was given or around it.
So it is looked for: among all living modules when ``attach`` is called, when a module becomes part of
one (which is how every wrapper begins), and by what torch says of the forward that is running.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from pycomm.torch_internals import active_ddp_module, children_of, has_parts

_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "averages gradients itself",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "shards parameters and averages their gradients itself"
    ),
    "deepspeed.runtime.engine.DeepSpeedEngine": "averages gradients itself",
}
"""What does so, by the full names of classes: none of them is imported for this."""


def wrapper_of(cls: type) -> str | None:
    """Which of the known wrappers ``cls`` is, or is derived from."""
    return next((name for base in cls.__mro__ if (name := f"{base.__module__}.{base.__qualname__}") in _WRAPPERS), None)


def refuse_wrapped(names: Mapping[str, torch.Tensor], model: Any, hint: str = "") -> None:
    """ValueError if a living wrapper has one of the parameters. Looks at every object there is.

    Args:
        hint: what to write instead, where that is known better.
    """
    if isinstance(model, torch.nn.Module):
        for module in model.modules():
            if wrapper_of(type(module)) is not None:
                raise ValueError(_says(module, next(iter(names), "?"), _around(module, model), hint))
    found = _first_conflict(names)
    if found is not None:
        gc.collect()  # it may be one that nobody has any more
        found = None
        found = _first_conflict(names)
    if found is not None:
        module, name = found
        raise ValueError(_says(module, name, _parent_of(module), hint))


def refuse_active_wrapper(names_of: Callable[[], Mapping[str, torch.Tensor]]) -> None:
    """ValueError if DistributedDataParallel's forward is running around these parameters."""
    active = active_ddp_module()
    if active is not None:
        name = _common(active, names_of())
        if name is not None:
            raise ValueError(_says(active, name, _parent_of(active), ""))


class Owner(Protocol):
    """Who averages parameters here."""

    module: torch.nn.Module | None

    def named_parameters(self) -> Mapping[str, torch.Tensor]: ...


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_watch: list[Any] = []
"""The handle of the hook on module registration, while there are owners."""


def watch_constructions(owner: Owner) -> None:
    """Let the constructor of a wrapper raise ValueError, from now on, where it gets parameters of ``owner``."""
    _owners.add(owner)
    if not _watch:
        _watch.append(register_module_module_registration_hook(_on_registration))


def unwatch_constructions(owner: Owner) -> None:
    """Undo :func:`watch_constructions`."""
    _owners.discard(owner)
    if not _owners:
        while _watch:
            _watch.pop().remove()


def _on_registration(parent: torch.nn.Module, _name: str, child: torch.nn.Module | None) -> None:
    if child is None or wrapper_of(type(parent)) is None or _conflict(child) is None:
        return
    gc.collect()  # the owner may be one that nobody has any more
    name = _conflict(child)
    if name is not None:
        raise ValueError(_says(parent, name, None, ""))


def _conflict(child: torch.nn.Module) -> str | None:
    for owner in _owners:
        names = owner.named_parameters()
        name = _common(child, names)
        if name is not None:
            return name
        if _share_modules(child, owner.module):  # FSDP has taken its parameters already
            return next(iter(names), "?")
    return None


def _living_wrappers() -> Iterator[torch.nn.Module]:
    known: dict[type, bool] = {}
    for thing in gc.get_objects():
        cls = type(thing)
        if cls not in known:
            known[cls] = issubclass(cls, torch.nn.Module) and wrapper_of(cls) is not None
        if known[cls]:
            yield thing


def _first_conflict(names: Mapping[str, torch.Tensor]) -> tuple[torch.nn.Module, str] | None:
    for wrapper in _living_wrappers():
        name = _common(wrapper, names)
        if name is not None:
            return wrapper, name
    return None


def _common(module: torch.nn.Module, names: Mapping[str, torch.Tensor]) -> str | None:
    """The first of ``names`` whose parameter ``module`` has."""
    if not has_parts(module):
        return None  # half made, or half gone
    ids = {id(p) for p in module.parameters()}
    return next((name for name, p in names.items() if id(p) in ids), None)


def _share_modules(a: torch.nn.Module, b: torch.nn.Module | None) -> bool:
    return b is not None and (any(m is a for m in b.modules()) or any(m is b for m in a.modules()))


def _around(wrapper: torch.nn.Module, model: torch.nn.Module) -> torch.nn.Module | None:
    return None if wrapper is model else model


def _parent_of(wrapper: torch.nn.Module) -> torch.nn.Module | None:
    """A module of which ``wrapper`` is a part: OptimizedModule, _FabricModule and the like."""
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.nn.Module):
            module: torch.nn.Module = thing
            if any(child is wrapper for child in children_of(module).values()):
                return module
    return None


def _says(wrapper: torch.nn.Module, name: str, outer: torch.nn.Module | None, hint: str) -> str:
    kind = wrapper_of(type(wrapper))
    assert kind is not None
    inside = "" if outer is None else f" (inside {type(outer).__name__})"
    short = kind.rsplit(".", 1)[1]
    advice = hint or f"train the module without {short}, or leave pycomm.attach out"
    if not hint and "accelerate" in sys.modules:
        advice += "; with Accelerate, accelerator.prepare(optimizer, dataloader) without the model"
    if not hint and any(name.split(".")[0] in ("lightning", "lightning_fabric") for name in sys.modules):
        advice += "; with Fabric, fabric.setup_optimizers(optimizer) without fabric.setup(model)"
    return (
        f"parameter {name!r} belongs to a {short}{inside}, which {_WRAPPERS[kind]}: with pycomm on the same parameters "
        f"gradients would be wrong. {advice[0].upper()}{advice[1:]}"
    )
