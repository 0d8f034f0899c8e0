"""What the operations of a process group have in common: their arguments, and the way that a call takes."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch

from pycomm.backend.engine import Engine, Job
from pycomm.backend.gpu import GpuSide
from pycomm.backend.monitored import USERS_TAG_END
from pycomm.backend.reduction import name_of
from pycomm.backend.work import BackendWork
from pycomm.errors import CommError
from pycomm.torch_internals import keeps_python_works

F = TypeVar("F", bound=Callable[..., Any])
Tensors = Sequence[torch.Tensor]


class Planned(NamedTuple):
    """What is to be run for a call.

    Attributes:
        name: name of the operation.
        job: does it.
        result: tensors that it writes.
        opts: torch's options, which say whether the caller waits for it.
    """

    name: str
    job: Job
    result: Sequence[Any]
    opts: Any


def collective(operation: Callable[..., Planned]) -> Callable[..., Any]:
    """Return the method that runs what ``operation`` plans, or hands the call to the group's side on GPUs.

    If the call cannot be planned, the ranks that call the same are told.
    """

    @functools.wraps(operation)
    def call(self: Calls, *args: Any, **kwargs: Any) -> Any:
        try:
            args = tuple(map(_arrived, args))
            side = self.side_of(_device_of(args))
            planned = operation(self, *args, **kwargs) if side is None else None
        except Exception as error:
            self.engine.channel.refuse_and_raise(error)
        if side is not None:
            return side.call(operation.__name__, *args, **kwargs)
        assert planned is not None
        work = self.run(planned)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    return call


def message(operation: F) -> F:
    """Hand calls of ``operation``, which only two ranks take part in, with a tensor on a GPU to that side."""

    @functools.wraps(operation)
    def call(self: Calls, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_arrived, args))
        side = self.side_of(_device_of(args))
        if side is not None:
            return side.call(operation.__name__, *args, **kwargs)
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
        # For C++ that waits for them. DistributedDataParallel does at once, so that few are enough.
        self._recent: deque[BackendWork] = deque(maxlen=0 if keeps_python_works() else 8)

    def gpu_side(self, device: torch.device) -> GpuSide:
        """Return what operates on tensors of ``device``, which is made at first use."""
        if self._gpu_side is None:
            self._gpu_side = GpuSide(self.engine, device)
        return self._gpu_side

    def side_of(self, device: torch.device | None) -> GpuSide | None:
        """Return what operates on tensors of ``device``; ``None`` if that is this group itself, in CPU memory."""
        return None if device is None or device.type == "cpu" else self.gpu_side(device)

    def run(self, planned: Planned) -> BackendWork:
        """Run what is ``planned``; on this thread if the options say so."""
        name, job, result, opts = planned
        timed = functools.partial(_timed, job, self.seconds(opts))
        work = self.engine.run(name, timed, result, bool(getattr(opts, "asyncOp", True)))
        self._recent.append(work)
        return work

    def seconds(self, opts: Any, timeout: timedelta | None = None) -> float:
        """Return the limit of every single wait of an operation."""
        limit = timeout if timeout is not None else getattr(opts, "timeout", None)
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else 0.0
        return seconds if seconds > 0 else self.engine.timeout

    def require_one_per_rank(self, operation: str, name: str, tensors: Sequence[Any]) -> None:
        """Raise ValueError unless there are as many ``tensors`` as ranks."""
        if len(tensors) != self.engine.size:
            wanted = f"wanted one for each of {self.engine.size} ranks"
            raise ValueError(f"{operation}: {name} has {len(tensors)} tensors, {wanted}")


def reduction(opts: Any) -> str:
    """Return the name of the reduction that ``opts`` has."""
    return "sum" if opts is None else name_of(getattr(opts, "reduceOp", opts))


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


def only(tensors: Any) -> Any:
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
