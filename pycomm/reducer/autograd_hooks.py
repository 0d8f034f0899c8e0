"""What pycomm leaves at models and parameters. None of it keeps the rest of pycomm alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from pycomm.reducer.uncovered import Uncovered
from pycomm.torch_internals import accumulation_hooks


class ForwardHook:
    """Lies among the module's hooks; a copy of the module (``deepcopy``, ``pickle``) gets one without effect.

    In a forward that torch.compile compiles nothing is looked at: what would be found there is found when
    backward begins, or before the step.
    """

    def __init__(self, before_forward: Callable[[], None] | None) -> None:
        self._before_forward = before_forward

    def __call__(self, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        if self._before_forward is not None:
            self._before_forward()

    def __deepcopy__(self, memo: object) -> ForwardHook:
        return ForwardHook(None)

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[None]]:
        return ForwardHook, (None,)


class Watcher(Protocol):
    """What is to be kept alive by the hooks of a module, and asked before its forward."""

    def before_forward(self) -> None: ...
    def knows(self, param: torch.Tensor) -> bool: ...


class ModelHooks:
    """Hooks on an optimizer and its module, which hold what they call.

    Args:
        before_step: called before each step, but after its closure.
        stepped: called before a closure runs for the first time.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module | None,
        before_step: Callable[[], None],
        stepped: Callable[[], None],
        watcher: Watcher,
    ) -> None:
        self._handles: list[Any] = [optimizer.register_step_pre_hook(step_hook(before_step, stepped))]
        self._uncovered: Uncovered | None = None
        if module is not None:
            self._handles.append(module.register_forward_pre_hook(ForwardHook(watcher.before_forward)))
            self._uncovered = Uncovered(module, watcher.knows)

    def warn_of_uncovered(self) -> None:
        """Warn of gradients that nobody averages; once."""
        if self._uncovered is not None:
            self._uncovered.warn()

    def remove(self) -> None:
        """Leave optimizer and module as they were."""
        for handle in self._handles:
            handle.remove()
        if self._uncovered is not None:
            self._uncovered.close()


def step_hook(check: Callable[[], None], begin: Callable[[], None]) -> Callable[..., Any]:
    """A pre-hook for ``optimizer.step`` that calls ``check``: after its closure, if it has one, each time that runs.

    A closure runs the last backward pass of a window itself. Before the first time ``begin`` is called: some
    optimizers (SAM) use the gradients that are there, and ask for others then.
    """

    def hook(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            check()
            return None
        begin()
        ask: Callable[[], Any] = closure

        def checked_closure() -> Any:
            loss = ask()
            check()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": checked_closure}
        return (args[0], checked_closure, *args[2:]), kwargs

    return hook


class GradientHook:
    """Calls ``method(owner, slot)`` when the gradient of ``param`` has been accumulated.

    Weakly, both: a parameter's hooks are out of the garbage collector's sight, so what they hold is
    never collected together with it.
    """

    def __init__(self, owner: Any, method: Callable[[Any, Any], None], slot: Any, param: torch.Tensor) -> None:
        self._owner, self._slot, self._method = weakref.ref(owner), weakref.ref(slot), method
        self._name = slot.name
        _drop_orphans(param)
        register: Any = param.register_post_accumulate_grad_hook
        self._handle = register(self)

    def __call__(self, _param: torch.Tensor) -> None:
        owner, slot = self._owner(), self._slot()
        if owner is None or slot is None:
            raise RuntimeError(
                f"the gradient of {self._name!r} is not averaged any more: the optimizer that was attached is gone; "
                "attach() the one that you use now"
            )
        self._method(owner, slot)

    @property
    def orphaned(self) -> bool:
        return self._owner() is None

    def is_last(self, param: torch.Tensor) -> bool:
        """Whether no other hook of ``param``, which may change the gradient, is called after this one."""
        hooks = accumulation_hooks(param)
        return len(hooks) == 1 or next(reversed(hooks)) == self._handle.id

    def remove(self) -> None:
        self._handle.remove()


def _drop_orphans(param: torch.Tensor) -> None:
    """Those of optimizers that are gone: ``param`` is about to be attached again."""
    for hook in list(accumulation_hooks(param).values()):
        if isinstance(hook, GradientHook) and hook.orphaned:
            hook.remove()
