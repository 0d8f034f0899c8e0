"""What the operations of a process group have in common: their arguments, and the way that a call takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch

from pycomm.backend.engine import Engine, Job
from pycomm.backend.gpu import GpuSide
from pycomm.backend.monitored import USERS_TAG_END
from pycomm.backend.reduction import name_of
from pycomm.backend.work import BackendWork
from pycomm.errors import CommError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Tensors = Sequence[torch.Tensor]


def by_device(operation: F) -> F:
    """Hand calls of ``operation`` with tensors on GPUs to the group's side that has them."""

    @functools.wraps(operation)
    def call(self: Calls, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_arrived, args))
        device = _device_of(args)
        if device is not None and device.type != "cpu":
            return self.gpu_side(device).call(operation.__name__, *args, **kwargs)
        work = operation(self, *args, **kwargs)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    return cast(F, call)


def _arrived(arg: Any) -> Any:
    """Return ``arg`` with the results of torch's functional collectives in the place of what stands for them.

    DTensor passes on tensors that wait for their collective when they are first used. torch's own groups meet them
    through its dispatcher, which waits; a group in Python is called directly.
    """
    if isinstance(arg, torch.Tensor):
        return arg.trigger_wait() if type(arg) is not torch.Tensor and hasattr(arg, "trigger_wait") else arg
    if isinstance(arg, (list, tuple)) and any(_arrived(each) is not each for each in arg):
        return [_arrived(each) for each in arg]
    return arg


def _device_of(args: Sequence[Any]) -> torch.device | None:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device
        if isinstance(arg, (list, tuple)) and (found := _device_of(arg)) is not None:
            return found
    return None


class Calls:
    """Group of an :class:`pycomm.backend.engine.Engine`, as its operations see it."""

    engine: Engine

    def set_engine(self, engine: Engine) -> None:
        """Use ``engine`` from now on."""
        self.engine = engine
        self._gpu_side: GpuSide | None = None
        self._coalescing: list[BackendWork] | None = None
        self._num_barriers = 0  # that were monitored

    def gpu_side(self, device: torch.device) -> GpuSide:
        """Return what operates on tensors of ``device``, which is made at first use."""
        if self._gpu_side is None:
            self._gpu_side = GpuSide(self.engine, device)
        return self._gpu_side

    # Arguments.

    def checked(self, check: Callable[[], T]) -> T:
        """Return the result of ``check``; if it raises, tell the ranks that call the same operation."""
        try:
            return check()
        except Exception as error:
            self.engine.channel.refuse_and_raise(error)

    def reduction(self, opts: Any) -> str:
        """Return the name of the reduction that ``opts`` has."""
        return "sum" if opts is None else self.checked(lambda: name_of(getattr(opts, "reduceOp", opts)))

    def only(self, tensors: Any) -> Any:
        """Return the one element of a list."""
        return self.checked(lambda: _only(tensors))

    def run(self, name: str, job: Job, result: Sequence[Any], opts: Any) -> BackendWork:
        """Run ``job`` as an operation called ``name`` that writes ``result``; on this thread if ``opts`` say so."""
        timed = functools.partial(_timed, job, self.seconds(opts))
        return self.engine.run(name, timed, result, bool(getattr(opts, "asyncOp", True)))

    def seconds(self, opts: Any, timeout: timedelta | None = None) -> float:
        """Return the limit of every single wait of an operation."""
        limit = timeout if timeout is not None else getattr(opts, "timeout", None)
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else 0.0
        return seconds if seconds > 0 else self.engine.timeout

    def require_one_per_rank(self, operation: str, name: str, tensors: Sequence[Any]) -> None:
        """Raise ValueError on every rank unless there are as many ``tensors`` as ranks."""
        if len(tensors) == self.engine.size:
            return
        problem = f"{operation}: {name} has {len(tensors)} tensors, wanted one for each of {self.engine.size} ranks"
        self.engine.channel.refuse_and_raise(ValueError(problem))


def _timed(job: Job, seconds: float) -> None:
    """Run ``job``; if it fails because a wait took longer than ``seconds``, say so as torch's backends do."""
    try:
        job()
    except CommError as error:
        if error.elapsed < seconds:
            raise
        text = f"{error} (the timeout is {seconds:g} s)"
        raise CommError(
            text, rank=error.rank, peer=error.peer, operation=error.operation, elapsed=error.elapsed
        ) from error


def _only(tensors: Any) -> Any:
    """Return the one element of a list, which torch's calling convention has for several GPUs of a process."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"one tensor per process is wanted, {len(tensors)} came")
    return tensors[0]


def users_tag(tag: int) -> int:
    """Return ``tag``, which must not be one of monitored_barrier's."""
    if tag >= USERS_TAG_END:
        raise ValueError(f"tag is {tag}, wanted one below {USERS_TAG_END}")
    return tag


def root_of(opts: Any) -> int:
    """Return the root that ``opts`` has, a rank of the group."""
    return int(opts) if isinstance(opts, int) else int(getattr(opts, "rootRank", 0))
