"""Calls of a process group's operations: torch's arguments, and the side, CPU or GPU, that runs them."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from pycomm.collectives.backend.engine import GroupEngine
from pycomm.collectives.backend.gpu import GpuSide
from pycomm.collectives.backend.work import BackendWork, Result
from pycomm.errors import CommError, reworded
from pycomm.torch_internals import keeps_python_works

F = TypeVar("F", bound=Callable[..., Any])

_NO_TIME = timedelta(0)

METHODS: dict[str, Callable[..., Any]] = {}
"""Methods of a process group by torch's names for them; see :func:`operation`."""


class Planned(NamedTuple):
    """Collective to be run for a call.

    Attributes:
        name: name of the operation.
        run: does it, given ``args`` and the limit of every single wait, in seconds.
        result: tensors that it writes, or a function that returns them.
        opts: torch's options, which say whether the caller waits for it, and for how long.
        timeout: how long, where that is an argument of its own.
    """

    name: str
    run: Callable[..., None]
    args: tuple[Any, ...]
    result: Result
    opts: Any
    timeout: timedelta | None = None


class Calls:
    """Calls of the operations of one process group.

    Args:
        engine: runs them in CPU memory.
    """

    def __init__(self, engine: GroupEngine) -> None:
        self.engine = engine
        self.gpu: GpuSide | None = None
        self.coalescing: list[BackendWork] | None = None
        self.num_barriers = 0  # that were monitored
        # For C++ that waits for them. DistributedDataParallel does at once, so that few are enough.
        self._recent: deque[BackendWork] = deque(maxlen=0 if keeps_python_works() else 8)

    def side_of(self, device: torch.device | None) -> GpuSide | None:
        """Return the side that operates on tensors of ``device``; ``None`` for CPU memory, where the engine does."""
        if device is None or device.type == "cpu":
            return None
        if self.gpu is None:
            self.gpu = GpuSide(self.engine, device)
        return self.gpu

    def start(self, operation: Planned | BackendWork) -> BackendWork | None:
        """Run what is planned; return its work. If the options say that the caller waits, there is none.

        It has then been done on this thread, as by torch's own groups.
        """
        if isinstance(operation, Planned):
            name, run, args, result, opts, timeout = operation
            job = functools.partial(_timed, run, args, self.seconds(opts, timeout))
            if not getattr(opts, "asyncOp", True):
                self.engine.channel.enqueue(job)
                return None
            work = self.engine.run(name, job, result, True)
            self._recent.append(work)
        else:
            work = operation
        if self.coalescing is not None:
            self.coalescing.append(work)
        return work

    def seconds(self, opts: Any, timeout: timedelta | None = None) -> float:
        """Return the limit of every single wait of an operation."""
        limit = timeout if timeout is not None else getattr(opts, "timeout", None)
        return limit.total_seconds() if isinstance(limit, timedelta) and limit > _NO_TIME else self.engine.timeout

    def require_one_per_rank(self, operation: str, name: str, tensors: Sequence[Any]) -> None:
        """Raise ValueError unless there are as many ``tensors`` as ranks."""
        if len(tensors) != self.engine.size:
            wanted = f"wanted one for each of {self.engine.size} ranks"
            raise ValueError(f"{operation}: {name} has {len(tensors)} tensors, {wanted}")


def operation(*names: str, is_collective: bool = True) -> Callable[[F], F]:
    """Make a function the method of process groups that torch calls by any of ``names``.

    The function gets the group's :class:`Calls` and torch's arguments. It returns the plan, or the work of an operation
    that it has started. Calls with tensors on a GPU go to the group's GPU side. If a collective cannot be planned, it
    is refused, so that the other ranks raise too.
    """

    def register(function: F) -> F:
        @functools.wraps(function)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            calls: Calls = group.calls
            try:
                args = tuple(map(_arrived, args))
                side = calls.side_of(_device_of((*args, *kwargs.values())))
                started: Any = function(calls, *args, **kwargs) if side is None else None
            except Exception as error:
                if not is_collective:
                    raise
                calls.engine.channel.refuse_and_raise(error)
            return calls.start(started) if side is None else side.call(names, *args, **kwargs)

        METHODS.update(dict.fromkeys(names, call))
        return function

    return register


def _arrived(arg: Any) -> Any:
    """Return ``arg`` with the tensors of torch's functional collectives waited for.

    DTensor passes tensors that wait for their collective at first use. For torch's own groups its dispatcher waits; a
    group in Python is called directly.
    """
    if isinstance(arg, torch.Tensor):
        return arg.trigger_wait() if type(arg) is not torch.Tensor and hasattr(arg, "trigger_wait") else arg
    if isinstance(arg, (list, tuple)) and any(_arrived(each) is not each for each in arg):
        return [_arrived(each) for each in arg]
    return arg


def _device_of(args: Sequence[Any]) -> torch.device | None:
    """Return the device of the first tensor, or of the options of a barrier."""
    for arg in args:
        found = _device_of(arg) if isinstance(arg, (list, tuple)) else getattr(arg, "device", None)
        if found is not None:
            return torch.device(found)
    return None


def _timed(run: Callable[..., None], args: tuple[Any, ...], seconds: float) -> None:
    """Call ``run(*args, seconds)``; if a wait in it takes longer than ``seconds``, say so as torch's backends do."""
    try:
        run(*args, seconds)
    except CommError as error:
        raise_timed(error, seconds)


def raise_timed(error: CommError, seconds: float) -> NoReturn:
    """Raise ``error``, which says what the timeout was if a wait took that long."""
    if error.elapsed < seconds:
        raise error
    raise reworded(error, f"{error} (the timeout is {seconds:g} s)", CommError) from None
