"""Hooks of a training loop: of a module's forward, of ``optimizer.zero_grad()``, and of all optimizers' steps."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pycomm.optim.copies import MarkedParts, watch_copy
from pycomm.torch_internals import (
    called_parts,
    children_of,
    compiled_calls,
    hooks_of,
    is_recording,
    leave_out_of_scripts,
    parameters_of,
)


class ForwardHook:
    """Forward hook that does nothing; a ``deepcopy`` of a module gets it in place of a real one.

    The real hooks also do nothing in a forward that torch.compile traces; their checks then run when backward begins,
    or before the step.
    """

    def __call__(self, *_: Any) -> None:
        pass

    def __deepcopy__(self, memo: object) -> ForwardHook:
        return self.of_copy()

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
        self._handles: list[Any] = [module.register_forward_hook(_AfterForward(self, ""))]

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
            self._handles.append(part.register_forward_pre_hook(_BeforePart(self)))
            self._handles.append(part.register_forward_hook(_AfterForward(self, name)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class OfCopy(ForwardHook):
    """Pre-hook of a copy of an attached module."""

    def __init__(self) -> None:
        self._hooked: set[int] = set()

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling() and not is_recording():
            watch_copy(module, self._hooked)

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
    for hooks in (hooks for part in module.modules() for hooks in hooks_of(part)):
        for key in [key for key, hook in hooks.items() if isinstance(hook, OfCopy)]:
            del hooks[key]


class StepWatch:
    """Watch of all optimizers' steps, but for those that torch.compile traces.

    It ends with :meth:`remove`, or with the object that keeps it.

    Args:
        before: bound method, held weakly, that is called with the optimizer before each step.
        after: likewise after it; ``None``: nothing is.
    """

    def __init__(
        self,
        before: Callable[[torch.optim.Optimizer], None],
        after: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        self._methods = weakref.WeakMethod(before), None if after is None else weakref.WeakMethod(after)
        _watch_steps()
        _watches.add(self)

    def call(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Call the method before (0) or after (1) a step of ``optimizer``."""
        reference = self._methods[number]
        method = None if reference is None else reference()
        if method is not None:
            method(optimizer)

    def remove(self) -> None:
        _watches.discard(self)


_watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()


@functools.cache
def _watch_steps() -> None:
    """Call all watches from now on.

    These hooks stay: the garbage collector might take out those of one object while torch goes through them.
    """

    def hook(number: int) -> Callable[..., None]:
        def call(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for watch in () if torch.compiler.is_compiling() else _watches:
                watch.call(number, optimizer)

        return call

    register_optimizer_step_pre_hook(hook(0))
    register_optimizer_step_post_hook(hook(1))


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
    """Call all watches from now on, in place of torch's method: one of an object would go into its copies."""
    call = torch.nn.Module.zero_grad

    @functools.wraps(call)
    def zero_grad(module: torch.nn.Module, set_to_none: bool = True) -> None:
        for watch in () if torch.compiler.is_compiling() else list(_zero_grad_watches):
            watch.call(module)
        call(module, set_to_none)

    torch.nn.Module.zero_grad = zero_grad  # type: ignore[method-assign,assignment]


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
