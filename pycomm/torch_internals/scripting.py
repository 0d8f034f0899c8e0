"""TorchScript, and other recordings of a module's forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx._symbolic_trace as _symbolic_trace

_jit: Any = torch.jit
# Newer releases of torch renamed it, and warn about the old name.
_is_fx_tracing: Callable[[], bool] = (
    getattr(_symbolic_trace, "is_fx_symbolic_tracing", None) or _symbolic_trace.is_fx_tracing
)
_recursive: Any = torch.jit._recursive

_left_out: set[type] = set()


def leave_out_of_scripts(kind: type) -> None:
    """Let ``torch.jit.script`` pass over hooks of modules' forward that are of class ``kind``.

    It compiles all hooks that it finds, and hooks cannot opt out: ``torch.jit.ignore`` and ``unused`` are for methods
    and functions. It also caches the types of modules, with references to the hooks, forever.
    """
    _watch_scripts()
    _left_out.add(kind)


def is_recording() -> bool:
    """Return whether a forward is being recorded, by torch.compile, torch.export, torch.jit.trace or torch.fx."""
    return torch.compiler.is_compiling() or bool(_jit.is_tracing()) or _is_fx_tracing()


@functools.cache
def _watch_scripts() -> None:
    infer_type, make_stubs = _recursive.infer_concrete_type_builder, _recursive.get_hook_stubs

    @functools.wraps(infer_type)
    def infer_type_without_hooks(nn_module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _without_hooks(nn_module):
            return infer_type(nn_module, *args, **kwargs)

    @functools.wraps(make_stubs)
    def make_other_stubs(nn_module: torch.nn.Module) -> Any:
        with _without_hooks(nn_module):
            return make_stubs(nn_module)

    _recursive.infer_concrete_type_builder, _recursive.get_hook_stubs = infer_type_without_hooks, make_other_stubs


@contextlib.contextmanager
def _without_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Give ``module`` dicts without hooks to leave out. Its own come back as they were: handles refer to them."""
    kinds, own = tuple(_left_out), vars(module)
    kept = {
        name: own[name]
        for name in ("_forward_hooks", "_forward_pre_hooks")
        if any(isinstance(hook, kinds) for hook in own.get(name, {}).values())
    }
    for name, hooks in kept.items():
        others = ((key, hook) for key, hook in hooks.items() if not isinstance(hook, kinds))
        own[name] = type(hooks)(others)
    try:
        yield
    finally:
        own.update(kept)
