"""Modules, and torch's own wrappers of them."""

from __future__ import annotations

import functools
import gc
import operator
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


def children_of(module: torch.nn.Module) -> Mapping[str, torch.nn.Module | None]:
    """Return the children of ``module`` by name; none if it is only half initialized."""
    children: Mapping[str, torch.nn.Module | None] = vars(module).get("_modules", {})
    return children


def parts_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield ``module`` and all modules inside it, once each, without calling their methods.

    ``modules()`` and ``parameters()`` may be overridden, and fail for a half-initialized module or wrapper (torch's
    OptimizedModule).
    """
    seen, left = {id(module)}, [module]
    while left:
        part = left.pop()
        yield part
        for child in children_of(part).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                left.append(child)


def own_parameters(module: torch.nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the parameters of ``module`` itself by name: torch's own dict, which reflects later changes."""
    parameters: Mapping[str, torch.Tensor | None] = vars(module).get("_parameters", {})
    return parameters


def hooks_of(module: torch.nn.Module) -> list[OrderedDict[int, Any]]:
    """Return torch's own dicts, which take attributes, of the hooks of forward and after ``load_state_dict``.

    There are none if ``module`` is only half initialized.
    """
    names = ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_post_hooks")
    return [found for name in names if isinstance(found := vars(module).get(name), OrderedDict)]


def parameters_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters of ``module`` and of all modules inside it, as :func:`parts_of` finds them."""
    for part in parts_of(module):
        yield from (param for param in own_parameters(part).values() if param is not None)


class Places:
    """Objects in dicts, and whether they are still there. Checked in every forward, so without a Python loop.

    Args:
        dicts: such as :func:`own_parameters` of modules; others than dicts, as in TorchScript's, are left out.
        wanted: returns whether an object counts.
    """

    def __init__(self, dicts: Iterable[Mapping[str, Any]], wanted: Callable[[Any], bool] = lambda _: True) -> None:
        self._dicts = [each for each in dicts if isinstance(each, dict)]
        self._size = sum(map(len, self._dicts))
        found = [(each, key, value) for each in self._dicts for key, value in each.items() if wanted(value)]
        self._holders, self._keys, self._objects = ([entry[i] for entry in found] for i in range(3))

    def are_unchanged(self) -> bool:
        """Return whether each object is where it was, and none was added to the dicts."""
        found = map(dict.get, self._holders, self._keys)
        return not self.has_others_beside() and all(map(operator.is_, found, self._objects))

    def has_others_beside(self) -> bool:
        """Return whether the dicts' sizes have changed."""
        return sum(map(len, self._dicts)) != self._size

    def others(self) -> list[Any]:
        """Return what is in the place of the objects that were replaced."""
        found = zip(map(dict.get, self._holders, self._keys), self._objects, strict=True)
        return [now for now, before in found if now is not before]


def buffers_of(module: torch.nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the buffers of ``module`` itself, without its children's, by name."""
    return module._buffers


def keeps_statistics_aside(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is a normalization in training mode, whose backward does not use its buffers.

    It normalizes by the batch and only writes running statistics, but autograd saves them and checks their versions.
    """
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


_WRAPPED = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""What torch's wrappers call the module inside, by the names of their classes, of which none is imported for this."""


def by_plain_names(module: torch.nn.Module | None, named: Mapping[str, T]) -> dict[str, T]:
    """Return what is ``named`` in ``module`` by the names that it has without wrappers, where these are different."""
    plain = {name: _plain(module, name) for name in named}
    counts = Counter(plain.values())
    return {plain[name] if counts[plain[name]] == 1 else name: value for name, value in named.items()}


def _plain(part: torch.nn.Module | None, name: str) -> str:
    words = []
    for word in name.split("."):
        kinds = (kind.__name__ for kind in type(part).__mro__ if kind.__module__.startswith("torch."))
        if not any(_WRAPPED.get(kind) == word for kind in kinds):
            words.append(word)
        part = None if part is None else dict(children_of(part).items()).get(word)  # TorchScript has no dicts
    return ".".join(words)


def renamed(saved: Mapping[str, T], here: Iterable[str]) -> dict[str, T]:
    """Return what was ``saved``, perhaps in other wrappers, by the names ``here``; names without a match stay.

    A saved name matches the same name or, if that is not here, the only one that differs just by words of wrappers.
    """

    def bare(name: str) -> str:
        return ".".join(word for word in str(name).split(".") if word not in _WRAPPED.values())

    names = set(here)
    left = {bare(name): name for name in names - saved.keys()}
    counts = Counter(map(bare, [*(names - saved.keys()), *(saved.keys() - names)]))  # 2: one on each side
    others = {name: left.get(bare(name), name) if counts[bare(name)] == 2 else name for name in saved.keys() - names}
    return {others.get(name, name): value for name, value in saved.items()}


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``torch.compile`` was given to make ``module``, or ``module`` itself."""
    inner = vars(module).get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, torch.nn.Module) else module


def compiled_calls(module: torch.nn.Module, begin: Callable[[], None], note: Callable[[Any], None]) -> list[Any]:
    """Call ``begin()`` before each call of ``module`` that torch.compile has compiled, and ``note(output)`` after it.

    Hooks of the module itself are part of the compiled code. Wrappers are found among all objects of the process, which
    takes up to a second: nothing leads from a module to its wrapper.

    Returns:
        Handles with ``remove``; none if the module has not been compiled.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return []
    kind = dynamo.OptimizedModule
    wrappers = [each for each in gc.get_objects() if type(each) is kind and uncompiled(each) is module]
    handles: list[Any] = [each.register_forward_pre_hook(lambda *_: begin()) for each in wrappers]
    handles += [each.register_forward_hook(lambda *given: note(given[-1])) for each in wrappers]
    if module._compiled_call_impl is not None:  # by module.compile()
        handles.append(_NotedCall(module, module._compiled_call_impl, begin, note))
    return handles


class _NotedCall:
    """Call of a module that ``module.compile()`` has compiled, until ``remove()``."""

    def __init__(
        self, module: torch.nn.Module, call: Callable[..., Any], begin: Callable[[], None], note: Callable[[Any], None]
    ) -> None:
        self._module, self._before = module, call

        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            begin()
            output = call(*args, **kwargs)
            note(output)
            return output

        self._call = module._compiled_call_impl = noted

    def remove(self) -> None:
        if self._module._compiled_call_impl is self._call:
            self._module._compiled_call_impl = self._before


def called_parts(module: torch.nn.Module, prefix: str = "") -> list[tuple[str, torch.nn.Module]]:
    """Return the named children of ``module``; instead of lists and dicts, which nobody calls, their children.

    Modules of TorchScript, which take no hooks, are left out.
    """
    found = []
    for name, child in children_of(module).items():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            found += called_parts(child, f"{prefix}{name}.")
        elif child is not None and not isinstance(child, torch.jit.ScriptModule):
            found.append((f"{prefix}{name}", child))
    return found


def active_ddp_module() -> torch.nn.Module | None:
    """Return the DistributedDataParallel module whose forward is running, or ``None``."""
    return DistributedDataParallel._active_ddp_module


def convolve(
    module: torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return what ``module`` would return for ``x`` if these were its weight and bias."""
    out: torch.Tensor = module._conv_forward(x, weight, bias)
    return out
