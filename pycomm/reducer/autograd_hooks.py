"""Hooks on optimizers, models and parameters. None of them keeps the rest of pycomm alive."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from pycomm.counting import GradientCounter
from pycomm.optim.attached import is_covered
from pycomm.optim.module_hooks import AfterForward, BeforeForward, ZeroGradHook, forget_original
from pycomm.torch_internals import accumulation_hooks


class Uncovered:
    """Watch over the parameters of ``module`` that no Reducer covers; warns once if one of them gets a gradient.

    Args:
        module: the module whose parameters are watched.
        covers: returns whether the Reducer that is being made averages a parameter, or is to leave it alone.
    """

    def __init__(self, module: torch.nn.Module, covers: Callable[[torch.Tensor], bool]) -> None:
        self._covers = covers
        self._names: list[str] = []
        self._handles: dict[int, Any] = {}  # by id of the parameter
        self.watch(module)

    def watch(self, module: torch.nn.Module) -> None:
        """Hook the trainable parameters that are neither covered nor hooked yet."""
        for name, param in module.named_parameters():
            is_trained = param.requires_grad and param.is_leaf
            if is_trained and id(param) not in self._handles and not self._is_covered(param):
                register: Any = param.register_post_accumulate_grad_hook
                self._handles[id(param)] = register(_Note(self, name))

    def note(self, name: str, param: torch.Tensor) -> None:
        """Note that ``param`` has got a gradient."""
        if self._is_covered(param):  # by an attach that came later
            self._handles[id(param)].remove()
        else:
            self._names.append(name)

    def _is_covered(self, param: torch.Tensor) -> bool:
        return self._covers(param) or is_covered(param)

    def warn(self) -> None:
        """Warn of the parameters noted so far; only once. Called at the end of a pass."""
        if not self._names:
            return
        names = list(dict.fromkeys(self._names))
        self.close()
        shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warnings.warn(
            "these parameters of the module get gradients, but are no parameters of the optimizer, and nothing "
            f"averages them: {shown}. Anything computed from them differs between the ranks, for example "
            "clip_grad_norm_(model.parameters()). Attach the optimizer that has them too, or write "
            "attach(..., all_parameters=True), or requires_grad_(False)",
            RuntimeWarning,
            stacklevel=2,
        )

    def close(self) -> None:
        """Remove all hooks, and forget what was noted."""
        for handle in self._handles.values():
            handle.remove()
        self._names.clear()


class _Note:
    """Hook of a parameter that does not keep its owner alive."""

    def __init__(self, owner: Uncovered, name: str) -> None:
        self._owner, self._name = weakref.ref(owner), name

    def __call__(self, param: torch.Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.note(self._name, param)


class Watcher(Protocol):
    """Object that hooks of an optimizer and a module keep alive, and call."""

    def before_forward(self) -> None: ...
    def note_forward(self, output: Any) -> None: ...
    def note_zero_grad(self) -> None: ...
    def enter_step(self) -> bool: ...
    def begin_step(self) -> None: ...
    def run_closure(self, closure: Callable[[], Any]) -> Any: ...
    def before_step(self) -> None: ...
    def after_step(self) -> None: ...
    def covers(self, param: torch.Tensor) -> bool: ...


class ModelHooks:
    """Hooks on an optimizer and its module. They hold strong references to the objects they call.

    Args:
        optimizer, module: objects to hook.
        watcher: object to call.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module | None,
        watcher: Watcher,
    ) -> None:
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(step_hook(watcher)),
            optimizer.register_step_post_hook(lambda *_: watcher.after_step()),
            ZeroGradHook(optimizer, watcher.note_zero_grad),
        ]
        self._module, self._uncovered = module, None if module is None else Uncovered(module, watcher.covers)
        if module is not None:
            forget_original(module)
            before = BeforeForward(watcher.before_forward, watches_copies=True)
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(AfterForward(watcher.note_forward)))

    def watch_uncovered(self) -> None:
        """Watch parameters that the module has got since."""
        if self._module is not None and self._uncovered is not None:
            self._uncovered.watch(self._module)

    def warn_of_uncovered(self) -> None:
        """Warn once of gradients that nobody averages."""
        if self._uncovered is not None:
            self._uncovered.warn()

    def remove(self) -> None:
        """Remove the hooks from the optimizer and the module."""
        for handle in self._handles:
            handle.remove()
        if self._uncovered is not None:
            self._uncovered.close()


def step_hook(watcher: Watcher) -> Callable[..., Any]:
    """Return a pre-hook for ``optimizer.step`` that checks gradients, after each run of the closure if there is one.

    A closure runs the last backward pass of a window itself. ``begin_step`` is called before its first run, because
    some optimizers (SAM) use the existing gradients first and only then ask for new ones. ``enter_step`` returns
    whether this is no step inside another one: a class that calls the step of its base class runs the hooks twice.
    """

    def hook(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not watcher.enter_step():
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            watcher.before_step()
            return None
        watcher.begin_step()
        evaluate: Callable[[], Any] = closure

        def checked_closure() -> Any:
            loss = watcher.run_closure(evaluate)
            watcher.before_step()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": checked_closure}
        return (args[0], checked_closure, *args[2:]), kwargs

    return hook


class GradientHook:
    """Hook that calls ``method(owner, slot)`` when the gradient of ``param`` has been accumulated, or counts it.

    It counts, with ``counter`` if there is one, where nothing else is to be done. Both references are weak: the
    garbage collector does not see a parameter's hooks, so it would never collect a cycle that runs through them.
    """

    def __init__(
        self,
        owner: Any,
        method: Callable[[Any, Any], None],
        slot: Any,
        param: torch.Tensor,
        counter: GradientCounter | None,
    ) -> None:
        self.count_with(counter)
        self._owner, self._slot, self._method = weakref.ref(owner), weakref.ref(slot), method
        self._name = slot.name
        _drop_orphans(param)
        register: Any = param.register_post_accumulate_grad_hook
        self._handle = register(self)

    def __call__(self, _param: torch.Tensor) -> None:
        if not torch.compiler.is_compiling() and self._count():
            return
        owner, slot = self._owner(), self._slot()
        if owner is None or slot is None:
            raise RuntimeError(
                f"the gradient of {self._name!r} is no longer averaged: the optimizer that was attached is gone; "
                "attach() the one that you use now"
            )
        self._method(owner, slot)

    def count_with(self, counter: GradientCounter | None) -> None:
        """Count with ``counter`` from now on: the parameter has another place."""
        self._count = counter.count if counter is not None else _never

    @property
    def orphaned(self) -> bool:
        """Return whether the owner no longer exists."""
        return self._owner() is None

    def is_last(self, param: torch.Tensor) -> bool:
        """Return whether no other hook of ``param``, which might change the gradient, is called after this one."""
        hooks = accumulation_hooks(param)
        return len(hooks) == 1 or next(reversed(hooks)) == self._handle.id

    def remove(self) -> None:
        """Remove the hook from its parameter."""
        self._handle.remove()


def _never() -> bool:
    return False


def _drop_orphans(param: torch.Tensor) -> None:
    """Remove the hooks of optimizers that no longer exist from ``param``, which is about to be attached again."""
    for hook in list(accumulation_hooks(param).values()):
        if isinstance(hook, GradientHook) and hook.orphaned:
            hook.remove()
