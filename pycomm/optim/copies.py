"""Detection of copies of attached modules: training one is an error, as its gradients are not averaged.

A copy gives itself away in two ways. Its forward in training mode hooks its parameters, and their gradients raise. Its
parts carry marks, which note a ``deepcopy``: so an optimizer that steps a copy raises, however its gradients were made
(compiled, in eval mode, by a method other than forward, by ``torch.autograd.grad``).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pycomm.optim.attached import is_covered
from pycomm.optim.wrappers import is_wrapped
from pycomm.torch_internals import hooks_of, own_parameters, parts_of

_paused = [0]
"""Number of open contexts in which gradients stay local to this rank."""


@contextlib.contextmanager
def training_alone() -> Iterator[None]:
    """Permit gradients of copies inside the context."""
    _paused[0] += 1
    _copied_parts.clear()  # the step that uses these gradients comes after the context
    try:
        yield
    finally:
        _paused[0] -= 1


def watch_copy(module: torch.nn.Module, hooked: set[int]) -> None:
    """Hook the parameters of the copy ``module``, if it is about to be trained, but for those whose ids are ``hooked``.

    A copy may exist (a moving average, a teacher, a target network), but must not get gradients. With a single rank
    anything is allowed.
    """
    if not (module.training and torch.is_grad_enabled()) or not _has_others():
        return
    for name, param in module.named_parameters():
        if param.requires_grad and id(param) not in hooked:
            hooked.add(id(param))
            register: Any = param.register_post_accumulate_grad_hook
            register(_Refusal(name))


class _Refusal:
    """Hook of a parameter of a copy: raises RuntimeError when it gets a gradient that nothing averages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_averaged = False

    def __call__(self, param: torch.Tensor) -> None:
        if self._is_averaged or _paused[0] > 0:
            return
        self._is_averaged = _is_averaged(self._name, param)
        if not self._is_averaged:
            raise RuntimeError(_problem(self._name))

    def __deepcopy__(self, memo: object) -> _Refusal:
        return _Refusal(self._name)


def _is_averaged(name: str, param: torch.Tensor) -> bool:
    return is_covered(param) or is_wrapped(name, param)


def _problem(name: str) -> str:
    return (
        f"parameter {name!r} belongs to a copy (deepcopy) of a module that was attached, and nothing averages "
        "the copy: call attach() (or local_sgd() and the like) for the copy with its own optimizer. If each rank is to "
        "train it alone, copy the module before that, or run backward() inside `with reducer.paused():` (reducer: what "
        "attach() or pycomm.ddp.register() returned)"
    )


_USERS = "_pycomm_users"
"""Attribute of marked hooks: the number of :class:`MarkedParts` that have marked them."""
_copied_parts: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Parts of copies of attached modules."""
_num_copied = [0]
"""Number of parts that were ever copied."""
_unconcerned: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
"""Optimizers without a parameter of a copy, with the numbers of copied parts and of their parameters at the last look.

A moving average is a copy that lives as long as the training: looking again in every step would cost.
"""


class _Mark:
    """Methods of ``hooks``, a dict of the hooks of ``part``, by which it is copied and pickled.

    A ``deepcopy`` is noted, and marked, too. A pickle has no hooks of pycomm's, so that it loads where the module's own
    does. Python looks for both methods in an object before its class, and torch's dicts take attributes.
    """

    def __init__(self, hooks: OrderedDict[int, Any], part: torch.nn.Module | None, num_users: int = 0) -> None:
        self._hooks, self._part = weakref.ref(hooks), (lambda: None) if part is None else weakref.ref(part)
        vars(hooks).update({"__deepcopy__": self._copy, "__reduce_ex__": self._reduce, _USERS: num_users})

    def _copy(self, memo: dict[int, Any]) -> OrderedDict[int, Any]:
        hooks: dict[int, Any] = self._hooks() or {}
        made = OrderedDict((key, copy.deepcopy(hook, memo)) for key, hook in hooks.items())
        copied = memo.get(id(self._part()))  # deepcopy notes an object before it copies the attributes
        _Mark(made, copied)
        if copied is not None:
            _copied_parts.add(copied)
            _num_copied[0] += 1
        return made

    def _reduce(self, _protocol: int) -> tuple[Any, ...]:
        hooks: dict[int, Any] = self._hooks() or {}
        own = __name__.partition(".")[0]
        others = [item for item in hooks.items() if str(getattr(item[1], "__module__", "")).partition(".")[0] != own]
        return OrderedDict, (), None, None, iter(others)  # as OrderedDict's own method


class MarkedParts:
    """Marks on the parts of ``module``, until ``remove()``: stepping a copy of one raises RuntimeError."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parts = weakref.WeakSet(parts_of(module))
        for part in self._parts:
            for hooks in hooks_of(part):
                _Mark(hooks, part, vars(hooks).get(_USERS, 0) + 1)
            _copied_parts.discard(part)
        _watch_steps()

    def remove(self) -> None:
        for hooks in itertools.chain.from_iterable(map(hooks_of, self._parts)):
            own = vars(hooks)
            own[_USERS] = own.get(_USERS, 0) - 1
            for name in ("__deepcopy__", "__reduce_ex__", _USERS) if own[_USERS] < 1 else ():
                own.pop(name, None)


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_copies)


def _refuse_copies(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise RuntimeError if ``optimizer`` is about to step a copy whose gradients were not averaged."""
    if not _copied_parts or _paused[0] > 0 or not _has_others():
        return
    looked_at = _num_copied[0], sum(len(group["params"]) for group in optimizer.param_groups)
    if _unconcerned.get(optimizer) == looked_at:
        return
    names = {id(param): name for part in _copied_parts for name, param in own_parameters(part).items()}
    params = [param for group in optimizer.param_groups for param in group["params"] if id(param) in names]
    for param in params:
        if param.grad is not None and not _is_averaged(names[id(param)], param):
            raise RuntimeError(_problem(names[id(param)]))
    # Looking for the wrapper that averages them in every step would cost, too.
    if not params or any(param.grad is not None and not is_covered(param) for param in params):
        _unconcerned[optimizer] = looked_at


def _has_others() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
