"""Hooks of a training loop: of a module's forward, and of ``optimizer.zero_grad()``."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pycomm.optim.copies import CopyWatch, MarkedParts
from pycomm.torch_internals import children_of, forward_pre_hooks, is_recording, leave_out_of_scripts, parameters_of


class ForwardHook:
    """Forward hook that does nothing; a copied module (``deepcopy``, ``pickle``) gets it in place of a real one.

    The real hooks also do nothing in a forward that torch.compile traces; their checks then run when backward begins,
    or before the step.
    """

    def __call__(self, *_: Any) -> None:
        pass

    def __deepcopy__(self, memo: object) -> ForwardHook:
        return self.of_copy()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self.of_copy()), ()

    def of_copy(self) -> ForwardHook:
        """Return the hook that a copy of the module gets."""
        return ForwardHook()


class BeforeForward(ForwardHook):
    """Pre-hook that calls ``before_forward()``. With ``watches_copies``, training a copy of the module is an error."""

    def __init__(self, before_forward: Callable[[], None], *, watches_copies: bool = False) -> None:
        self._before_forward, self._watches_copies = before_forward, watches_copies

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._before_forward()

    def of_copy(self) -> ForwardHook:
        return OfCopy() if self._watches_copies else ForwardHook()


class AfterForward(ForwardHook):
    """Hook that calls ``after_forward(output)`` after a forward in training mode whose graph is kept."""

    def __init__(self, after_forward: Callable[[Any], None]) -> None:
        self._after_forward = after_forward

    def __call__(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled() and not is_recording():
            self._after_forward(output)


class OfCopy(ForwardHook):
    """Pre-hook of a copy of an attached module."""

    def __init__(self) -> None:
        self._watch = CopyWatch()

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling() and not is_recording():
            self._watch.before_forward(module)

    def of_copy(self) -> ForwardHook:
        return OfCopy()


leave_out_of_scripts(ForwardHook)


def watch_copies(module: torch.nn.Module) -> Any:
    """Make training an unattached copy of ``module`` an error; return handles with ``remove``."""
    forget_original(module)
    return module.register_forward_pre_hook(BeforeForward(lambda: None, watches_copies=True)), MarkedParts(module)


def watch_copies_with(params: Iterable[torch.Tensor]) -> list[Any]:
    """Do as :func:`watch_copies` for the outermost modules that have one of ``params``. Looks at every object."""
    ids = {id(param) for param in params}
    modules: list[torch.nn.Module] = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    having = [module for module in modules if any(id(param) in ids for param in parameters_of(module))]
    inside = {id(child) for module in having for child in children_of(module).values()}
    return [watch for module in having if id(module) not in inside for watch in watch_copies(module)]


def forget_original(module: torch.nn.Module) -> None:
    """Permit training of ``module``, which is averaged from now on, even if it is a copy of an attached one."""
    for part in module.modules():
        hooks = forward_pre_hooks(part)
        for key in [key for key, hook in hooks.items() if isinstance(hook, OfCopy)]:
            del hooks[key]


class ZeroGradHook:
    """Hook that calls ``note()`` before ``optimizer.zero_grad()``, for which torch has no hooks.

    It replaces the method of this object only. Copies and pickles of the optimizer use that of the class.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, note: Callable[[], None]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._before = vars(optimizer).get("zero_grad")
        call: Callable[..., None] = optimizer.zero_grad

        @functools.wraps(call)
        def zero_grad(*args: Any, **kwargs: Any) -> None:
            note()
            call(*args, **kwargs)

        self._hook = zero_grad
        vars(optimizer)["zero_grad"] = zero_grad

    def remove(self) -> None:
        """Restore the optimizer's method, unless other code has replaced it since."""
        optimizer = self._optimizer()
        if optimizer is None or vars(optimizer).get("zero_grad") is not self._hook:
            return
        if self._before is None:
            del vars(optimizer)["zero_grad"]
        else:
            vars(optimizer)["zero_grad"] = self._before
