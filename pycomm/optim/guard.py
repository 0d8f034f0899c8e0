"""Guard around the steps of all optimizers: it refuses to train a copy of an attached module, which nothing averages.

A copy may exist (a moving average, a teacher, a target network). A ``deepcopy`` of an attached module is noted, so an
optimizer that steps it raises, however its gradients were made. With a single rank anything is allowed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pycomm.optim.attached import is_covered
from pycomm.torch_internals import is_dtensor, is_flattened, own_parameters, parameters_of, parts_of

_paused = [0]
"""Number of open contexts in which gradients stay local to this rank."""
_copies: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Copies of attached modules."""
_num_copies = [0]
"""Number of copies that were ever made."""
_unconcerned: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
"""Optimizers that step no copy alone, with the numbers of copies and of their parameters at the last look.

A moving average is a copy that lives as long as the training: looking again in every step would cost.
"""


@contextlib.contextmanager
def training_alone() -> Iterator[None]:
    """Permit training of copies with gradients that were made inside the context."""
    _paused[0] += 1
    _copies.clear()  # the step that uses these gradients comes after the context
    try:
        yield
    finally:
        _paused[0] -= 1


def permit(module: torch.nn.Module) -> None:
    """Permit training of ``module``, which is now averaged, even if it is a copy of an attached one."""
    for part in parts_of(module):
        _copies.discard(part)


class HooksMark:
    """Methods of ``hooks``, a dict of the hooks of ``module``, that keep pycomm's hooks out of copies and pickles.

    So pickles load without pycomm. Python looks for both methods in an object before its class, and torch's dicts
    accept attributes.

    Args:
        notes: returns whether a copy of the module is to be noted, by the hooks that there are.
    """

    def __init__(
        self, hooks: OrderedDict[int, Any], module: torch.nn.Module, notes: Callable[[dict[int, Any]], bool]
    ) -> None:
        self._hooks, self._module, self._notes = weakref.ref(hooks), weakref.ref(module), notes
        vars(hooks).update({"__deepcopy__": self._copy, "__reduce_ex__": self._reduce})

    def _others(self) -> list[tuple[int, Any]]:
        own = __name__.partition(".")[0]
        return [each for each in self._all().items() if str(getattr(each[1], "__module__", "")).split(".")[0] != own]

    def _all(self) -> dict[int, Any]:
        return self._hooks() or {}

    def _copy(self, memo: dict[int, Any]) -> OrderedDict[int, Any]:
        made = OrderedDict((key, copy.deepcopy(hook, memo)) for key, hook in self._others())
        copied = memo.get(id(self._module()))  # deepcopy notes an object before it copies the attributes
        if copied is not None and self._notes(self._all()):
            HooksMark(made, copied, lambda _: True)  # a copy of a copy is one, too
            _copies.add(copied)
            _num_copies[0] += 1
        return made

    def _reduce(self, _protocol: int) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self._others())  # as OrderedDict's own method


class StepWatch:
    """Watch of all optimizers' steps, but for those that torch.compile traces.

    It ends with :meth:`remove`, or with the object that keeps it.

    Args:
        methods: bound methods, held weakly, that are called with the optimizer before each step, and after it if there
            is a second one.
    """

    def __init__(self, *methods: Callable[[torch.optim.Optimizer], None]) -> None:
        self._methods = list(map(weakref.WeakMethod, methods))
        guard_steps()
        _watches.add(self)

    def call(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Call the method before (0) or after (1) a step of ``optimizer``."""
        for method in [method() for method in self._methods[number : number + 1]]:
            if method is not None:
                method(optimizer)

    def remove(self) -> None:
        _watches.discard(self)


_watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()


def is_around(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` is a wrapper that calls ``inner``."""
    values = list(vars(optimizer).values())
    inside = [each for value in values if isinstance(value, (list, tuple)) for each in value]
    return any(value is inner for value in (*values, *inside))


@functools.cache
def guard_steps() -> None:
    """Install hooks that refuse to step copies, and call all watches.

    These hooks stay: the garbage collector might remove an object's hooks while torch iterates over them.
    """

    def hook(number: int) -> Callable[..., None]:
        def call(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if number == 0:
                _refuse_copies(optimizer)
            for watch in _watches:
                watch.call(number, optimizer)

        return call

    register_optimizer_step_pre_hook(hook(0))
    register_optimizer_step_post_hook(hook(1))


def _refuse_copies(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if ``optimizer`` is about to step a copy whose gradients were not averaged."""
    if not _copies or _paused[0] > 0 or not (dist.is_initialized() and dist.get_world_size() > 1):
        return
    looked_at = _num_copies[0], sum(len(group["params"]) for group in optimizer.param_groups)
    if _unconcerned.get(optimizer) == looked_at:
        return
    parts = [part for each in _copies for part in parts_of(each)]
    names = {id(param): name for part in parts for name, param in own_parameters(part).items()}
    params = [param for group in optimizer.param_groups for param in group["params"] if id(param) in names]
    alone = [p for p in params if p.grad is not None and not (is_covered(p) or is_flattened(p) or is_dtensor(p))]
    if alone and not _is_in_ddp(alone[0]):
        raise RuntimeError(
            f"parameter {names[id(alone[0])]!r} belongs to a copy (deepcopy) of a module that was attached, and "
            "nothing averages the copy: call attach() (or local_sgd() and the like) for the copy with its own "
            "optimizer. If each rank is to train it alone, copy the module before that, or run backward() inside `with "
            "reducer.paused():` (reducer: what attach() or pycomm.ddp.register() returned)"
        )
    if alone or not params:
        _unconcerned[optimizer] = looked_at


def _is_in_ddp(param: torch.Tensor) -> bool:
    """Return whether a DistributedDataParallel averages ``param``. Searches all objects: only before an error."""
    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return any(each is param for ddp in found for each in parameters_of(ddp))
