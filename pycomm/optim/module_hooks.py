"""Hooks of a training loop: of a module's forward, and of ``zero_grad()``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pycomm.optim.guard import HooksMark, guard_steps, permit
from pycomm.torch_internals import (
    called_parts,
    compiled_calls,
    hooks_of,
    is_recording,
    leave_out_of_scripts,
)


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls the bound ``method`` while its object lives, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*args)

    return call


class ForwardHook:
    """Hook of a module's forward. Copies and pickles of the module do not have it.

    It does nothing in a forward that torch.compile traces. Its checks then run as backward begins, or before the step.
    """

    notes_copies = False
    """Whether training a copy of the module is an error."""


class BeforeForward(ForwardHook):
    """Pre-hook that calls ``before_forward()``."""

    def __init__(self, before_forward: Callable[[], None], *, notes_copies: bool = False) -> None:
        self._before_forward, self.notes_copies = before_forward, notes_copies

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._before_forward()


class _BeforePart(ForwardHook):
    """Pre-hook of a part of a model, which tells ``watch`` that a forward of the model may begin."""

    def __init__(self, watch: ForwardWatch) -> None:
        self._watch = watch

    def __call__(self, *_: Any) -> None:
        self._watch.begin()


class _AfterForward(ForwardHook):
    """Hook of the part ``called``, which tells ``watch`` of its forwards."""

    def __init__(self, watch: ForwardWatch, called: str) -> None:
        self._watch, self._called = watch, called

    def __call__(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        self._watch.noted(output, self._called)


class ForwardWatch:
    """Hooks that note the forwards by which ``module`` is trained.

    These are forwards whose graph is kept, of the module itself in training mode. A loop may train in another way: in
    evaluation mode, by a compiled module, or by calling parts of the module. Then the hooks move there.

    Args:
        note: called with the output of each forward, and the name of the part that was called; "" for all of it.
        before: called before the first forward of a step, if that is no forward of the module itself.
    """

    def __init__(
        self, module: torch.nn.Module, note: Callable[[Any, str], None], before: Callable[[], None] = lambda: None
    ) -> None:
        self._module, self._note, self._before = weakref.ref(module), note, before
        self._in_evaluation = self._is_wide = self._has_begun = False
        self._handles: list[Any] = [hook_forward(module, _AfterForward(self, ""), before=False)]

    def begin(self) -> None:
        """Note that a forward begins; the first one in a step is reported."""
        if not self._has_begun and not torch.compiler.is_compiling():
            self._has_begun = True
            self._before()

    def noted(self, output: Any, called: str) -> None:
        """Note a forward, unless it cannot be one of training."""
        module = self._module()
        counts = module is not None and (self._in_evaluation or module.training)
        if counts and torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_recording():
            self._note(output, called)

    def trained(self, has_noted: bool) -> None:
        """Learn from a step of training how the module is called: ``has_noted`` says whether a forward was noted."""
        self._has_begun = False
        module = self._module()
        if module is not None and module.training:
            self._in_evaluation = False  # forwards in evaluation mode are evaluations again
        if has_noted or self._is_wide or module is None:
            return
        if not self._in_evaluation and not module.training:
            self._in_evaluation = True
            return
        self._is_wide = True
        compiled = compiled_calls(module, self.begin, lambda output: self.noted(output, ""))
        self._handles += compiled
        for name, part in [] if compiled else called_parts(module):
            self._handles.append(hook_forward(part, _BeforePart(self)))
            self._handles.append(hook_forward(part, _AfterForward(self, name), before=False))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


leave_out_of_scripts(ForwardHook)


def hook_forward(module: torch.nn.Module, hook: ForwardHook, *, before: bool = True) -> Any:
    """Register ``hook`` for the forward of ``module``; return a handle with ``remove``."""
    for hooks in hooks_of(module):
        HooksMark(hooks, module, _note_copies)
    if hook.notes_copies:
        permit(module)
        guard_steps()
    register: Any = module.register_forward_pre_hook if before else module.register_forward_hook
    return register(hook)


def _note_copies(hooks: dict[int, Any]) -> bool:
    return any(isinstance(hook, ForwardHook) and hook.notes_copies for hook in hooks.values())


def watch_copies(module: torch.nn.Module) -> Any:
    """Make training an unattached copy of ``module`` an error; return a handle with ``remove``."""
    return hook_forward(module, BeforeForward(lambda: None, notes_copies=True))


class ModuleZeroGradWatch:
    """Watch of ``zero_grad()`` of all modules, for which torch has no hooks; it ends with the object that keeps it.

    Args:
        note: bound method, held weakly, that is called with the module before.
    """

    def __init__(self, note: Callable[[torch.nn.Module], None]) -> None:
        self._note = weakref.WeakMethod(note)
        _watch_zero_grad()
        _zero_grad_watches.add(self)

    def call(self, module: torch.nn.Module) -> None:
        """Call the method before ``zero_grad()`` of ``module``."""
        note = self._note()
        if note is not None:
            note(module)

    def remove(self) -> None:
        _zero_grad_watches.discard(self)


_zero_grad_watches: weakref.WeakSet[ModuleZeroGradWatch] = weakref.WeakSet()


@functools.cache
def _watch_zero_grad() -> None:
    """Replace the method of torch's class so that it calls all watches: a method of one object would be copied."""
    call = torch.nn.Module.zero_grad

    @functools.wraps(call)
    def zero_grad(module: torch.nn.Module, set_to_none: bool = True) -> None:
        for watch in () if torch.compiler.is_compiling() else list(_zero_grad_watches):
            watch.call(module)
        call(module, set_to_none)

    torch.nn.Module.zero_grad = zero_grad  # type: ignore[method-assign,assignment]


class ZeroGradHook:
    """Hook that calls ``note()`` before ``optimizer.zero_grad()``, for which torch has no hooks.

    It replaces the method of this object only. Copies and pickles of the optimizer use the class's method.
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
